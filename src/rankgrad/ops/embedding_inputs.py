"""Embeddings as they enter the scores: widened, normalised, scaled, mixed, and those of a shard of queries."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankgrad.ops.backends import resolve_precision
from rankgrad.ops.loss_config import Compute, LossConfig, is_wide
from rankgrad.ops.normalize import normalize_rows

Mixture = tuple[Tensor, Tensor, Tensor]  # first, second, alpha: see MixedRows


def prepared(embeddings: Tensor, compute: Compute, backend: str) -> Tensor:
    """Embeddings as they enter the scores: in float32 at least, and of length 1 if so chosen."""
    wide = embeddings if is_wide(embeddings) else embeddings.float()
    if not compute.normalize:
        return wide
    if backend == "triton":
        from rankgrad.ops.triton.operands import normalize

        return normalize(wide)
    return normalize_rows(wide)


def scaled(
    queries: Tensor, candidates: Tensor | None, score_scale: float | Tensor, config: LossConfig
) -> tuple[Tensor, Tensor | None, LossConfig]:
    """Embeddings whose scores are `score_scale` times as large: the root goes to both sides, which may be one tensor."""
    compute = replace(config.compute, precision=resolve_precision(config.compute.precision, queries), normalize=False)
    root = score_scale**0.5
    rows = prepared(queries, config.compute, "tiled") * root
    others = None if candidates is None else prepared(candidates, config.compute, "tiled") * root
    return rows, others, replace(config, compute=compute)


def _mixed(rows: Tensor, mixture: Mixture) -> Tensor:
    first, second, alpha = mixture
    return torch.lerp(rows[second], rows[first], alpha[:, None].to(rows))


@dataclass(frozen=True)
class EmbeddingInputs:
    """The embeddings of a call as they were given; see `embedding_losses`."""

    queries: Tensor
    candidates: Tensor | None
    mixture: Mixture | None
    shard: slice | None

    @property
    def query_mixture(self) -> Mixture | None:
        """That of the queries of the shard; `mixture` is that of the candidates."""
        if self.mixture is None or self.shard is None:
            return self.mixture
        first, second, alpha = (part[self.shard] for part in self.mixture)
        return first, second, alpha

    def tensors(self, compute: Compute, backend: str, *, mix: bool) -> tuple[Tensor, ...]:
        """What gets a gradient: queries, and candidates where they are not the same. `mix`: the mixtures, not their bases."""
        rows = prepared(self.queries, compute, backend)
        others = None if self.candidates is None else prepared(self.candidates, compute, backend).to(rows.dtype)
        if self.shard is not None:
            others = rows if others is None else others
            rows = rows if self.mixture is not None else rows[self.shard]
        if mix and self.mixture is not None and self.query_mixture is not None:
            rows = _mixed(rows, self.query_mixture)
            others = None if others is None else _mixed(others, self.mixture)
        return (rows,) if others is None else (rows, others)
