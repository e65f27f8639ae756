"""Which implementation runs. One decision in one place: an explicit request is honoured or refused, never replaced."""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rankgrad.ops.autograd import Door
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.relevance import LabelLists, ScoreLists
from rankgrad.ops.sources import EmbeddingDoor, Layout, MixedRows, PlainRows, Rows, ScoreDoor

if TYPE_CHECKING:
    from rankgrad.ops.cuda_graphs import Graphs, Steps

Mixture = tuple[Tensor, Tensor, Tensor]  # first, second, alpha: see MixedRows
Backend = Literal["auto", "triton", "tiled", "reference"]
Precision = Literal["auto", "fast", "high"]
BACKENDS = ("auto", "triton", "tiled", "reference")
PRECISIONS = ("auto", "fast", "high")


def resolve(
    backend: Backend, scores_of: Tensor, ranker: Ranker, *, caller: str, given: tuple[int, int] | None = None
) -> Literal["triton", "tiled", "reference"]:
    """The backend for embeddings such as `scores_of`, or for scores such as these, `given` as so many lists of such length.

    On a CPU the kernels run only on request, in Triton's interpreter.
    """
    if backend in ("tiled", "reference") or (backend == "auto" and not scores_of.is_cuda):
        return "reference" if backend == "reference" else "tiled"
    reason = _obstacle(scores_of, ranker, given is not None)
    if reason and backend == "triton":
        raise RuntimeError(f"{caller}: backend='triton' cannot run here: {reason}; use backend='auto' or 'tiled'")
    if reason is None and given is not None and backend == "auto":
        from rankgrad.ops.triton.scores import suits

        return "triton" if suits(*given) else "tiled"
    return "tiled" if reason else "triton"


def _obstacle(scores_of: Tensor, ranker: Ranker, given: bool) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not scores_of.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {scores_of.device} and TRITON_INTERPRET=1 is not set"
    if given:
        from rankgrad.ops.triton.scores import supports as supports_given

        if scores_of.dtype == torch.float64:
            return "the kernels compute in float32, and the scores are torch.float64"
        return None if supports_given(ranker) else f"there is no kernel for {ranker} on given scores"
    if scores_of.dtype != torch.float32:
        return f"the kernels compute in float32, and the embeddings are {scores_of.dtype}"
    from rankgrad.ops.triton.embeddings import supports

    return None if supports(ranker) else f"there is no kernel for {ranker}"


def resolve_precision(precision: Precision, embeddings: Tensor) -> Literal["fast", "high"]:
    """Precision of the kernels for embeddings as the caller gave them."""
    if precision != "auto":
        return precision
    half = embeddings.dtype in (torch.float16, torch.bfloat16)
    return "fast" if half or torch.is_autocast_enabled(embeddings.device.type) else "high"


def normalized(embeddings: Tensor, backend: Backend, ranker: Ranker, *, caller: str) -> Tensor:
    """Rows of length 1, by the backend's own kernels where it has them."""
    if resolve(backend, embeddings, ranker, caller=caller) == "triton":
        from rankgrad.ops.triton.row_ops import unit_rows

        return unit_rows(embeddings)
    return torch.nn.functional.normalize(embeddings, dim=1)


def tiled_door(
    lists: LabelLists, device: torch.device, mixed: Mixture | None = None, mixed_candidates: Mixture | None = None
) -> Callable[..., Door]:
    """Opens embeddings, or queries and candidates, over `lists` in plain torch; with a mixture the rows are mixed from them."""
    layout = Layout.of(lists, device)

    def door(queries: Tensor, candidates: Tensor | None = None) -> Door:
        on = layout.lists
        asking = _rows(queries, on.query_order, mixed)
        asked = asking if candidates is None else _rows(candidates, on.candidate_order, mixed_candidates)
        return EmbeddingDoor(asking, asked, layout)

    return door


def _rows(base: Tensor, order: Tensor, mixture: Mixture | None) -> Rows:
    return PlainRows(base, order) if mixture is None else MixedRows(base, order, *mixture)


def fused_door(
    lists: LabelLists,
    device: torch.device,
    precision: Literal["fast", "high"],
    *,
    unit_rows: bool,
    width: int | None = None,
) -> Callable[..., Door]:
    """The same with the fused kernels. `width`, the most relevant items of a query, spares the wait for it."""
    from rankgrad.ops.triton.embeddings import FusedDoor, FusedLayout

    layout = FusedLayout.of(lists, device) if width is None else FusedLayout(lists, [slice(0, len(lists.query_order))], [width])

    def door(queries: Tensor, candidates: Tensor | None = None) -> Door:
        return FusedDoor(queries, candidates, layout, precision, unit=unit_rows)

    return door


def score_door(lists: ScoreLists, backend: Literal["triton", "tiled"]) -> Callable[..., Door]:
    """Opens a matrix of scores over `lists`."""
    if backend == "tiled":
        return partial(ScoreDoor, lists=lists)
    from rankgrad.ops.triton.scores import FusedScoreDoor

    return partial(FusedScoreDoor, lists=lists)


class Replays:
    """The CUDA graphs of one loss. They belong to this process and this object: a copy begins without any."""

    _graphs: "Graphs | None" = None

    def __call__(self, settings: Any, leaf: Tensor, given: tuple[Tensor, ...], steps: "Steps") -> tuple[Tensor, ...] | None:
        """What `Graphs.run` gives: the loss of `steps` at `leaf`, or None where it must run as usual."""
        from rankgrad.ops.cuda_graphs import Graphs

        if self._graphs is None:
            self._graphs = Graphs()
        return self._graphs.run(settings, leaf, given, steps)

    def __getstate__(self) -> dict[str, Any]:
        return {}
