"""`evaluate_scores`: all metrics of scores that were computed elsewhere, such as those of a cross-encoder or a ranker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.eval.embedding_blocks import Array, Index
from rankgrad.eval.label_codes import encode
from rankgrad.eval.metrics import GRADED_COLUMN, PositiveRanks, checked_ks, graded_columns, metric_columns, per_query
from rankgrad.eval.protocols import type_of
from rankgrad.eval.result import Protocol, Result
from rankgrad.ops.pairs import Pairs
from rankgrad.ops.score_groups import Groups

CALLER = "evaluate_scores"

# Scores sorted at once.
SORTED_NUMBERS = 2**22


@dataclass(frozen=True, eq=False)
class _ScoreLists:
    """Checked lists, padded: row q is the list of query q."""

    scores: Tensor  # [Q, C], or [N] one list after another
    gains: Tensor  # of the same shape
    candidates: Tensor | None  # of the same shape
    groups: Groups | None  # of lists that follow each other
    graded: bool  # some gain is neither 0 nor 1
    ks: tuple[int, ...]
    neighbours: int
    labels: Index | None
    label_names: tuple[str, ...] | None

    @property
    def num_queries(self) -> int:
        return len(self.scores if self.groups is None else self.groups)

    def blocks(self) -> Iterator[tuple[Index, Tensor, Tensor, Tensor]]:
        """Some queries that have a relevant candidate at a time: scores, gains and which are candidates, [B, C] each."""
        width = self.scores.shape[1] if self.groups is None else self.groups.width
        step = max(SORTED_NUMBERS // max(width, 1), 1)
        for start in range(0, self.num_queries, step):
            rows = slice(start, min(start + step, self.num_queries))
            if self.groups is None:
                scores, gains = self.scores[rows], self.gains[rows]
                valid = torch.ones_like(gains, dtype=torch.bool) if self.candidates is None else self.candidates[rows]
            else:
                at, valid = self.groups.padded(self.scores.device, rows)
                scores, gains = self.scores[at], self.gains[at]
                valid = valid if self.candidates is None else valid & self.candidates[at]
            gains = gains.masked_fill(~valid, 0.0)
            some = (gains > 0).any(dim=1)
            if bool(some.any()):
                query = np.arange(rows.start, rows.stop)[some.cpu().numpy()]
                yield query, scores.masked_fill(~valid, -torch.inf)[some], gains[some], valid[some]


def evaluate_scores(
    scores: Array,
    relevance: Tensor | ArrayLike | Pairs,
    candidates: Tensor | ArrayLike | None = None,
    *,
    group_sizes: Sequence[int] | Tensor | ArrayLike | None = None,
    labels: Tensor | ArrayLike | None = None,
    ks: Sequence[int] = (1, 10, 100, 1000),
    neighbours: int = 0,
) -> Result:
    """All metrics of `evaluate`, and NDCG@k, for given scores; a higher score is better. Gains other than 0 and 1 add H-AP.

    Where scores are equal, irrelevant candidates come first, and of relevant ones those with a smaller gain.

    Args:
        scores: [Q, C] a list per query, tensor or numpy array; [N] one list after another with `group_sizes`.
        relevance: of the same shape: bool, or gains of at least 0. A candidate with a gain above 0 is relevant; NDCG uses the
            gains as they are, so give 2**grade - 1 for exponential gains. Or `Pairs` of row and column of [Q, C] scores.
        candidates: of the same shape, bool: False is padding and not ranked, whatever its score and relevance are.
        group_sizes: [Q] lengths of the lists, as in LightGBM.
        labels: [Q] classes of the queries, for `Result.by_class` and intervals by class.
        ks: cut-offs, any positive integers.
        neighbours: number of best candidates of each query to keep in the result; with `group_sizes` positions in the list.
    """
    return GIVEN_SCORES.run(_checked(scores, relevance, candidates, group_sizes, labels, ks, neighbours))


def _checked(
    scores: Any, relevance: Any, candidates: Any, group_sizes: Any, labels: Any, ks: Sequence[int], neighbours: int
) -> _ScoreLists:
    check_count(neighbours, name="neighbours", caller=CALLER, least=0)
    given = _tensor(scores, "scores")
    if not given.is_floating_point():
        raise TypeError(f"{CALLER}: scores must be floating-point numbers, got {given.dtype}")
    wanted = 2 if group_sizes is None else 1
    if given.ndim != wanted or not given.numel():
        shape = "[queries, candidates]" if wanted == 2 else "[items] with group_sizes"
        raise ValueError(f"{CALLER}: scores must be {shape} with at least one score, got shape {tuple(given.shape)}")
    groups = None if group_sizes is None else Groups.of(group_sizes, len(given), CALLER)
    if isinstance(relevance, Pairs):
        if groups is not None:
            raise TypeError(f"{CALLER}: with group_sizes relevance must be one number per score, got Pairs")
        relevance = relevance.of_batch(*given.shape, caller=CALLER).dense()[0]
    gains = _tensor(relevance, "relevance", given)
    mask = None if candidates is None else _tensor(candidates, "candidates", given)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{CALLER}: candidates must be bool, got {mask.dtype}")
    ranked = torch.ones_like(given, dtype=torch.bool) if mask is None else mask
    if bool((~torch.isfinite(given) & ranked).any()):
        bad = int((~torch.isfinite(given) & ranked).sum())
        raise ValueError(f"{CALLER}: scores of candidates must be finite, got {bad} NaN or infinite values")
    gains = gains.double()
    wrong = ~(torch.isfinite(gains) & (gains >= 0)) & ranked
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{CALLER}: relevance must be bool or gains of at least 0, got {gains[place].item()} at {list(place)}; "
            "mark padding in candidates"
        )
    if not bool(((gains > 0) & ranked).any()):
        raise ValueError(f"{CALLER}: no query has a relevant candidate: relevance is 0 everywhere")
    queries = len(given) if groups is None else len(groups)
    codes, names = None, None
    if labels is not None:
        codes, _, names = encode(labels, queries, None, 0, name="labels", caller=CALLER)
    precise = given.detach().to(torch.promote_types(given.dtype, torch.float32))
    graded = bool(((gains != 0) & (gains != 1) & ranked).any())
    return _ScoreLists(precise, gains, mask, groups, graded, checked_ks(ks, CALLER), neighbours, codes, names)


def _tensor(values: Any, name: str, like: Tensor | None = None) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    if like is not None:
        if tensor.shape != like.shape:
            raise ValueError(
                f"{CALLER}: {name} must have the shape of scores, {tuple(like.shape)}, got shape {tuple(tensor.shape)}"
            )
        tensor = tensor.to(like.device)
    return tensor


def _evaluate(lists: _ScoreLists) -> Result:
    columns: dict[str, list[NDArray[Any]]] = {}
    index, near = [], []
    for queries, scores, gains, valid in lists.blocks():
        counts, positives, is_positive = _counts(scores, gains > 0, valid)
        found = {**per_query(PositiveRanks.from_counts(counts, is_positive), lists.ks), **_ndcg(scores, gains, lists.ks)}
        if lists.graded:
            of_positives = scores.gather(1, positives), gains.gather(1, positives)
            name = GRADED_COLUMN["H-AP"]
            found[name] = graded_columns(counts, is_positive, *of_positives)[name]
        for name, values in found.items():
            columns.setdefault(name, []).append(values.cpu().numpy())
        index.append(queries)
        if lists.neighbours:
            best = scores.topk(min(lists.neighbours, scores.shape[1]), dim=1)
            near.append((best.indices.cpu().numpy(), best.values.float().cpu().numpy()))
    query = np.concatenate(index)
    metrics = metric_columns(lists.ks)
    metrics |= {f"NDCG@{k}": f"ndcg@{k}" for k in lists.ks}
    metrics |= GRADED_COLUMN if lists.graded else {}
    return Result(
        protocol=GIVEN_SCORES,
        columns=metrics,
        per_query={name: np.concatenate(parts).astype(type_of(name)) for name, parts in columns.items()},
        query_index=query,
        labels=None if lists.labels is None else lists.labels[query],
        label_names=lists.label_names,
        skipped=lists.num_queries - len(query),
        neighbours=(np.concatenate([i for i, _ in near]), np.concatenate([s for _, s in near])) if near else None,
    )


def _counts(scores: Tensor, relevant: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, P] irrelevant candidates at or above each positive, its column, and False at the padding."""
    number = relevant.sum(dim=1)
    width = int(number.max())
    columns = relevant.int().sort(dim=1, descending=True, stable=True).indices[:, :width]
    is_positive = torch.arange(width, device=scores.device) < number[:, None]
    irrelevant = scores.masked_fill(relevant | ~valid, -torch.inf).sort(dim=1).values
    below = torch.searchsorted(irrelevant, scores.gather(1, columns).contiguous())
    return scores.shape[1] - below, columns, is_positive


def _ndcg(scores: Tensor, gains: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """[B] NDCG of whole lists and at every k."""
    # by score, and where scores are equal by ascending gain: padding has gain 0 and score -inf and is last
    by_gain = gains.sort(dim=1, stable=True)
    order = scores.gather(1, by_gain.indices).sort(dim=1, descending=True, stable=True).indices
    ordered = by_gain.values.gather(1, order)
    ideal = by_gain.values.flip(1)
    discount = 1 / torch.log2(torch.arange(2, scores.shape[1] + 2, device=scores.device, dtype=torch.float64))
    gained, best = (ordered * discount).cumsum(dim=1), (ideal * discount).cumsum(dim=1)
    last = scores.shape[1] - 1
    return {
        "ndcg": gained[:, last] / best[:, last],
        **{f"ndcg@{k}": gained[:, min(k - 1, last)] / best[:, min(k - 1, last)] for k in ks},
    }


GIVEN_SCORES = Protocol(
    "given-scores",
    "Every row of scores is the list of one query. Candidates with a gain above 0 are relevant. Where scores are equal, "
    "irrelevant candidates come first. A query without a relevant candidate leaves the mean and is counted.",
    "scores of rankers and cross-encoders",
    _evaluate,
)
