"""Baselines by row chunks: the best that a user would write in torch for batches that do not fit at once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.baselines.dense import compiled, fast_ap_from, recall_at_k_from, relevant_items
from benchmarks.baselines.sorts import rambo_terms
from benchmarks.presets import AP_LAM, AP_MARGIN, BINS, RECALL_LAM, RECALL_MARGIN, TAU_RANK

Formulation = Callable[[Tensor, Tensor, int], Tensor]

UNROLLED = 16
"""Number of relevant items up to which a tile function is unrolled over them, so that scores are read once for all."""
TILE_SCORES, TILE_ROWS = 2**27, 2048
"""Scores that exist at once in a formulation by row chunks, half a gigabyte of float32, unless fewer rows than these
would leave the products short of work."""
PAIR_NUMBERS = 2**26
"""Coordinates of relevant items that are gathered at once."""


def sigmoid_count(scores: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Of scores [B, N] against thresholds [B, P]: sums of sigmoids, and of their slopes, [B, P] each."""
    if thresholds.shape[1] > UNROLLED:
        ahead = torch.sigmoid((scores[:, None, :] - thresholds[:, :, None]) / TAU_RANK)
        return ahead.sum(2), (ahead - ahead * ahead).sum(2) / TAU_RANK
    columns = [torch.sigmoid((scores - one) / TAU_RANK) for one in thresholds.split(1, 1)]
    slopes = [(ahead - ahead * ahead).sum(1) / TAU_RANK for ahead in columns]
    return torch.stack([ahead.sum(1) for ahead in columns], 1), torch.stack(slopes, 1)


def sigmoid_backward(scores: Tensor, thresholds: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N] gradient of the sums of sigmoids, weighted [B, P]."""
    if thresholds.shape[1] > UNROLLED:
        ahead = torch.sigmoid((scores[:, :, None] - thresholds[:, None, :]) / TAU_RANK)
        return ((ahead - ahead * ahead) * weights[:, None, :]).sum(2).div(TAU_RANK).to(dtype)
    gradient = torch.zeros_like(scores)
    for one, weight in zip(thresholds.split(1, 1), weights.split(1, 1), strict=True):
        ahead = torch.sigmoid((scores - one) / TAU_RANK)
        gradient = gradient + (ahead - ahead * ahead) * (weight / TAU_RANK)
    return gradient.to(dtype)


def ramp_count(scores: Tensor, thresholds: Tensor) -> tuple[Tensor, None]:
    """[B, bins + 1] cumulative histogram of FastAP, which is compared with no relevant item."""
    position = (1 - scores) * (BINS / 2)
    return torch.stack([(end - position).clamp(0, 1).sum(1) for end in range(1, BINS + 2)], 1), None


def ramp_backward(scores: Tensor, thresholds: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N] gradient of the cumulative histogram: a score lies on the ramp of one bin at most."""
    position = (1 - scores) * (BINS / 2)
    gradient = torch.zeros_like(scores)
    for end, weight in enumerate(weights.split(1, 1), 1):
        gradient = torch.where((end - position > 0) & (end - position < 1), weight * (BINS / 2), gradient)
    return gradient.to(dtype)


def step_count(scores: Tensor, thresholds: Tensor) -> Tensor:
    """[B, P] how many scores reach each threshold."""
    if thresholds.shape[1] > UNROLLED:
        return (scores[:, None, :] >= thresholds[:, :, None]).sum(2, dtype=torch.int32)
    return torch.stack([(scores >= one).sum(1, dtype=torch.int32) for one in thresholds.split(1, 1)], 1)


def step_backward(scores: Tensor, thresholds: Tensor, perturbed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, N] by how many ranks each score falls when the thresholds move, and how many reach the perturbed ones."""
    if thresholds.shape[1] > UNROLLED:
        before, after = thresholds[:, None, :] > scores[:, :, None], perturbed[:, None, :] > scores[:, :, None]
        return (after.to(scores.dtype) - before.to(scores.dtype)).sum(2).to(dtype), step_count(scores, perturbed)
    gradient = torch.zeros_like(scores)
    for one, other in zip(thresholds.split(1, 1), perturbed.split(1, 1), strict=True):
        gradient = gradient + ((other > scores).to(scores.dtype) - (one > scores).to(scores.dtype))
    return gradient.to(dtype), step_count(scores, perturbed)


@dataclass(frozen=True)
class Tiles:
    """What is done to the scores of a row chunk, forward and backward; `steepest` bounds the slope of one count."""

    count: Callable[[Tensor, Tensor], Any]
    backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], Any]
    steepest: float

    def under_compile(self) -> "Tiles":
        return Tiles(compiled(self.count), compiled(self.backward), self.steepest)


SIGMOID_TILES = Tiles(sigmoid_count, sigmoid_backward, 0.25 / TAU_RANK)
RAMP_TILES = Tiles(ramp_count, ramp_backward, BINS / 2)
STEP_TILES = Tiles(step_count, step_backward, 1.0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product with sums and result in float32 at least."""
    if a.dtype != torch.float16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _row_chunks(count: int, width: int, most: int, least_rows: int = 1) -> list[slice]:
    """Slices of about equal length with no more than `most` numbers, where that is `least_rows` rows of this width."""
    chunks = -(-count // max(least_rows, most // width))
    size = -(-count // chunks)
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _score_chunk(low: Tensor, rows: slice) -> Tensor:
    """Scores of some queries; minus infinity takes the query itself out of every count."""
    scores = _product(low[rows], low.T)
    scores.diagonal(rows.start).fill_(-torch.inf)
    return scores


def _embedding_gradient(
    low: Tensor, relevant: Tensor, d_thresholds: Tensor, scale: Tensor, gradient_of: Callable[[slice, Tensor], Tensor]
) -> Tensor:
    """Gradient of the embeddings, from that of chunks of scores (divided by `scale`) and that of the relevant scores.

    The relevant scores get theirs in float32: it is a sum over a whole row and would leave the range of float16 where
    the gradients of single scores fill it.
    """
    count, dim = low.shape
    gradient = torch.zeros(low.shape, dtype=d_thresholds.dtype, device=low.device)
    for rows in _row_chunks(count, count, TILE_SCORES, TILE_ROWS):
        tile = gradient_of(rows, _score_chunk(low, rows))
        gradient[rows] += _product(tile, low)
        gradient += _product(tile.T, low[rows])
    gradient *= scale
    for rows in _row_chunks(count, relevant.shape[1] * dim, PAIR_NUMBERS):
        near, weight = low[relevant[rows]].to(d_thresholds.dtype), d_thresholds[rows]
        gradient[rows] += (weight[:, None, :] @ near)[:, 0]
        from_query = weight[:, :, None] * low[rows][:, None, :].to(d_thresholds.dtype)
        gradient.index_add_(0, relevant[rows].flatten(), from_query.flatten(0, 1))
    return gradient


class _ChunkedCounts(torch.autograd.Function):
    """Counts [N, E] over all candidates and the scores [N, P] of the relevant ones, never with all scores at once."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, relevant: Tensor, tiles: Tiles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        low = unit.to(dtype)
        parts = []
        for rows in _row_chunks(len(low), len(low), TILE_SCORES, TILE_ROWS):
            scores = _score_chunk(low, rows)
            thresholds = scores.gather(1, relevant[rows])  # of the same rounded numbers as what they are compared with
            parts.append((*tiles.count(scores, thresholds), thresholds))
        counts, thresholds = torch.cat([part[0] for part in parts]), torch.cat([part[2] for part in parts])
        slopes = None if parts[0][1] is None else torch.cat([part[1] for part in parts])
        ctx.save_for_backward(low, relevant, thresholds, slopes)
        ctx.tiles = tiles
        return counts, thresholds

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        low, relevant, thresholds, slopes = ctx.saved_tensors
        d_counts, d_thresholds = outputs
        if slopes is not None:
            d_thresholds = d_thresholds - d_counts * slopes
        # the largest number that a gradient of a score can be, brought to where float16 has room
        scale = d_counts.abs().sum(1).amax().mul(ctx.tiles.steepest / 2**14).clamp(min=1e-30)
        weights = d_counts / scale

        def gradient_of(rows: slice, scores: Tensor) -> Tensor:
            d_scores: Tensor = ctx.tiles.backward(scores, thresholds[rows], weights[rows], low.dtype)
            return d_scores

        return _embedding_gradient(low, relevant, d_thresholds, scale, gradient_of), None, None, None


class _ChunkedRambo(torch.autograd.Function):
    """RaMBO by counting: a rank is the irrelevant items ahead, chunk by chunk, and the place among the relevant."""

    @staticmethod
    def forward(
        ctx: Any,
        unit: Tensor,
        relevant: Tensor,
        lam: float,
        margin: float,
        recall: bool,
        tiles: Tiles,
        dtype: torch.dtype,
    ) -> Tensor:
        low = unit.to(dtype)
        parts = []
        for rows in _row_chunks(len(low), len(low), TILE_SCORES, TILE_ROWS):
            scores = _score_chunk(low, rows)
            thresholds = scores.gather(1, relevant[rows]) - margin
            parts.append((tiles.count(scores.scatter_(1, relevant[rows], -torch.inf), thresholds), thresholds))
        counts, thresholds = (torch.cat(part) for part in zip(*parts, strict=True))
        positive_rank = _rank_among_relevant(thresholds)
        loss, slope = rambo_terms((counts + positive_rank).to(thresholds.dtype), positive_rank, recall)
        length = len(low) - 1
        perturbed = thresholds + slope * (lam * length / slope.numel())
        ctx.save_for_backward(low, relevant, counts, thresholds, perturbed)
        ctx.tiles, ctx.scale = tiles, 1 / (lam * length)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        low, relevant, counts, thresholds, perturbed = ctx.saved_tensors
        scale = outputs[0] * ctx.scale
        d_thresholds = torch.empty_like(thresholds)

        def gradient_of(rows: slice, scores: Tensor) -> Tensor:
            scores.scatter_(1, relevant[rows], -torch.inf)
            d_scores: Tensor
            d_scores, num_reaching = ctx.tiles.backward(scores, thresholds[rows], perturbed[rows], low.dtype)
            rank_change = _rank_among_relevant(perturbed[rows]) - _rank_among_relevant(thresholds[rows])
            d_thresholds[rows] = (num_reaching - counts[rows] + rank_change) * scale
            return d_scores

        gradient = _embedding_gradient(low, relevant, d_thresholds, scale, gradient_of)
        return gradient, None, None, None, None, None, None


def _rank_among_relevant(thresholds: Tensor) -> Tensor:
    return (thresholds[:, None, :] >= thresholds[:, :, None]).sum(2)


def chunked_formulation(loss: str, *, compiling: bool = True, dtype: torch.dtype = torch.float16) -> Formulation:
    """The loss by row chunks: the best that a user would write in torch.

    The library multiplies inputs of `dtype` into float32 scores of a few hundred megabytes, and what happens to a
    chunk of them is one function under torch.compile (`compiling`). Raises `UnavailableError` when called where
    torch.compile does not work.
    """
    tiles = {"recall_at_k": SIGMOID_TILES, "smooth_ap": SIGMOID_TILES, "fast_ap": RAMP_TILES}.get(loss, STEP_TILES)
    tiles = tiles.under_compile() if compiling else tiles

    def counts(embeddings: Tensor, labels: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor]
        result = _ChunkedCounts.apply(normalize(embeddings), relevant_items(labels, per_class), tiles, dtype)
        return result

    def recall_at_k(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        return recall_at_k_from(0.5 + counts(embeddings, labels, per_class)[0])

    def smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        count, thresholds = counts(embeddings, labels, per_class)
        positive_rank = 0.5 + ((thresholds[:, None, :] - thresholds[:, :, None]) / TAU_RANK).sigmoid_().sum(2)
        return 1 - (positive_rank / (0.5 + count)).mean()

    def fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        total, thresholds = counts(embeddings, labels, per_class)
        return fast_ap_from(total, (1 - thresholds).clamp(0, 2) * (BINS / 2))

    def rambo(lam: float, margin: float, recall: bool, embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        relevant = relevant_items(labels, per_class)
        result: Tensor
        result = _ChunkedRambo.apply(normalize(embeddings), relevant, lam, margin, recall, tiles, dtype)
        return result

    formulations: dict[str, Formulation] = {
        "recall_at_k": recall_at_k,
        "smooth_ap": smooth_ap,
        "fast_ap": fast_ap,
        "rambo_recall": functools.partial(rambo, RECALL_LAM, RECALL_MARGIN, True),
        "rambo_ap": functools.partial(rambo, AP_LAM, AP_MARGIN, False),
    }
    return formulations[loss]


def products_only(queries: Tensor, candidates: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Nothing but the three products of a forward and a backward pass, 6 Q C d operations: no formulation is faster.

    The results mean nothing: the products of `rows` queries at a time go into both gradients as they are.
    """
    tile = queries.new_empty(min(rows, len(queries)), len(candidates))
    d_queries, d_candidates = torch.empty_like(queries), torch.empty_like(candidates)
    for begin in range(0, len(queries), rows):
        some = queries[begin : begin + rows]
        scores = tile[: len(some)]
        torch.mm(some, candidates.T, out=scores)
        torch.mm(scores, candidates, out=d_queries[begin : begin + rows])
        torch.mm(scores.T, some, out=d_candidates)
    return d_queries, d_candidates
