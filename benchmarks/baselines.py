"""The formulations that the losses are measured against: the best a user would write by hand, and published ones.

All take embeddings [N, d] and labels [N] of a class-balanced batch (`per_class` of every class, in any order),
normalise the embeddings, and return the mean loss over the queries, with the papers' settings. They differ in how
they get the ranks, hence in time and memory, and not in what they compute, unless `Rival.differs` says so.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

Formulation = Callable[[Tensor, Tensor, int], Tensor]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

KS = (1, 2, 4, 8, 16)
TAU_RANK = 0.01
TAU_CUT = 1.0
BINS = 10
RECALL_LAM, RECALL_MARGIN = 4.0, 0.02
AP_LAM, AP_MARGIN = 0.5, 0.0


def relevant_items(labels: Tensor, per_class: int) -> Tensor:
    """[N, per_class - 1]: for each query the other members of its class."""
    members = labels.argsort().view(-1, per_class)
    member, other = (
        torch.arange(per_class, device=labels.device)[:, None],
        torch.arange(per_class - 1, device=labels.device),
    )
    others = other + (other >= member)  # [per_class, per_class - 1]: all members but the one of the row
    relevant = torch.empty(len(labels), per_class - 1, dtype=torch.int64, device=labels.device)
    relevant[members] = members[:, others]
    return relevant


def scores_without_self(embeddings: Tensor) -> Tensor:
    """Cosine similarities [N, N]; minus infinity on the diagonal takes the query out of every sum of sigmoids."""
    unit = normalize(embeddings)
    return (unit @ unit.T).masked_fill(torch.eye(len(unit), dtype=torch.bool, device=unit.device), -torch.inf)


def recall_at_k_from(rank: Tensor) -> Tensor:
    """The RS@k loss of soft ranks [queries, relevant]."""
    hits = [torch.sigmoid((k - rank) / TAU_CUT).sum(1).div(min(k, rank.shape[1])).clamp(max=1) for k in KS]
    return 1 - torch.stack(hits).mean()


def dense_ranks(embeddings: Tensor, labels: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """Soft ranks [N, relevant] among all and among the relevant candidates, through [N, relevant, N] comparisons."""
    scaled = scores_without_self(embeddings) / TAU_RANK
    own = scaled.gather(1, relevant_items(labels, per_class))
    # an item's comparison with itself is sigmoid(0) = 1/2, which turns the 1 of the rank into 1/2;
    # in place, because the difference is needed neither again nor for the gradient
    rank = 0.5 + (scaled[:, None, :] - own[:, :, None]).sigmoid_().sum(2)
    positive_rank = 0.5 + (own[:, None, :] - own[:, :, None]).sigmoid_().sum(2)
    return rank, positive_rank


def dense_recall_at_k(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RS@k of dense soft ranks."""
    return recall_at_k_from(dense_ranks(embeddings, labels, per_class)[0])


def dense_smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Smooth-AP of dense soft ranks: not the N x N x N of the published code, since only relevant items need a rank."""
    rank, positive_rank = dense_ranks(embeddings, labels, per_class)
    return 1 - (positive_rank / rank).mean()


def loop_recall_at_k(embeddings: Tensor, labels: Tensor, per_class: int, queries: int | None = None) -> Tensor:
    """RS@k query by query, as published (without the query in its own list); of the first `queries` only, if given."""
    unit = normalize(embeddings)
    relevant = relevant_items(labels, per_class)
    # unbind, because the gradient of scores[i] would be a matrix of zeros but for one row, for every single query
    rows = (unit[:queries] @ unit.T / TAU_RANK).unbind()
    losses = []
    for query, row in enumerate(rows):
        own = row[relevant[query]]
        ahead = (row - own[:, None]).sigmoid_()
        rank = 0.5 + ahead.sum(1) - ahead[:, query]
        losses.append(recall_at_k_from(rank[None]))
    return torch.stack(losses).mean()


def dense_fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """FastAP through every pair's part in every cumulative bin, [bins + 1, N, N].

    A triangular pulse summed over the bins up to one is a ramp, and a ramp costs half of what two flanks cost.
    """
    unit = normalize(embeddings)
    # the squared distance 2 - 2s in units of the bin width 4 / bins
    position = (1 - unit @ unit.T).clamp(0, 2) * (BINS / 2)
    relevant = position.gather(1, relevant_items(labels, per_class))
    self_mask = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    position = position.masked_fill(self_mask, 2.0 * BINS)  # beyond every bin
    end = torch.arange(1.0, BINS + 2, device=unit.device, dtype=unit.dtype)
    return fast_ap_from((end[:, None, None] - position).clamp(0, 1).sum(2).T, relevant)


def fast_ap_from(total: Tensor, relevant: Tensor) -> Tensor:
    """FastAP of cumulative bins [N, bins + 1] of all candidates and the relevant items' positions in them."""
    end = torch.arange(1.0, BINS + 2, device=total.device, dtype=total.dtype)
    positives = (end - relevant[:, :, None]).clamp(0, 1).sum(1)
    in_bin = positives.diff(dim=1, prepend=torch.zeros_like(positives[:, :1]))
    # where nothing lies up to a bin nothing relevant lies in it: the term is 0, whatever it is divided by
    ratio = in_bin * positives / total.clamp(min=torch.finfo(total.dtype).tiny)
    return 1 - ratio.sum(1).mean() / relevant.shape[1]


class _SortedRambo(torch.autograd.Function):
    """RaMBO with the ranking of every row by sorting: once for the ranks, once more for the perturbed scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, relevant: Tensor, lam: float, margin: float, recall: bool) -> Tensor:
        # the margin between relevant and irrelevant items, all of it on the few relevant ones
        shifted = scores.scatter_add(1, relevant, scores.new_full(relevant.shape, -margin))
        all_ranks = _rank_rows(shifted)
        rank = all_ranks.gather(1, relevant)
        positive_rank = (rank[:, None, :] <= rank[:, :, None]).sum(2)
        loss, slope = _rambo_terms(rank, positive_rank, recall)
        length = scores.shape[1] - 1
        perturbation = slope * (lam * length / slope.numel())  # lam belongs to ranks divided by the list's length
        ctx.save_for_backward(shifted, all_ranks, relevant, perturbation)
        ctx.scale = 1 / (lam * length)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        shifted, all_ranks, relevant, perturbation = ctx.saved_tensors
        moved = _rank_rows(shifted.scatter_add(1, relevant, perturbation)).sub_(all_ranks)
        return moved.mul_(outputs[0] * ctx.scale), None, None, None, None


def _rambo_terms(rank: Tensor, positive_rank: Tensor, recall: bool) -> tuple[Tensor, Tensor]:
    """What each relevant item adds to the loss, and the derivative by its rank: of loglog recall or of AP."""
    if recall:
        ahead = rank - positive_rank
        return torch.log1p(torch.log1p(ahead)), 1 / (1 + torch.log1p(ahead)) / (1 + ahead)
    return 1 - positive_rank / rank, positive_rank / rank.square()


def _rank_rows(scores: Tensor) -> Tensor:
    order = scores.argsort(1, descending=True)
    places = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    return torch.empty_like(scores).scatter_(1, order, places.expand_as(scores))


def sorted_rambo_recall(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RaMBO's recall loss, weighted by loglog."""
    relevant = relevant_items(labels, per_class)
    loss: Tensor = _SortedRambo.apply(scores_without_self(embeddings), relevant, RECALL_LAM, RECALL_MARGIN, True)
    return loss


def sorted_rambo_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RaMBO's AP loss."""
    relevant = relevant_items(labels, per_class)
    loss: Tensor = _SortedRambo.apply(scores_without_self(embeddings), relevant, AP_LAM, AP_MARGIN, False)
    return loss


def library_fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """FastAP of pytorch-metric-learning."""
    from pytorch_metric_learning.losses import FastAPLoss

    loss: Tensor = FastAPLoss(num_bins=BINS)(embeddings, labels)
    return loss


def library_smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Smooth-AP of pytorch-metric-learning, N x N x N."""
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss: Tensor = SmoothAPLoss(temperature=TAU_RANK)(embeddings, labels)
    return loss


class UnavailableError(Exception):
    """This machine lacks what the formulation needs."""


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function under torch.compile, which can fuse comparisons that eager torch stores."""

    @functools.cache
    def build() -> Callable[Arguments, Result]:
        return torch.compile(function, dynamic=False)

    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return build()(*arguments, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise UnavailableError(f"torch.compile: {problem}") from problem

    return run


@dataclass(frozen=True)
class Rival:
    """One way to compute one loss.

    `numbers(N, P)` estimates how many numbers forward and backward hold at their worst moment for N queries with
    P relevant items each: enough to tell beforehand what would not fit.
    """

    loss: str
    name: str
    function: Formulation
    numbers: Callable[[int, int], float]
    differs: str = ""  # what it computes instead of the loss; empty where it computes the loss
    sample: Formulation | None = None  # the same for SAMPLED_QUERIES queries only, where all would take too long


SAMPLED_QUERIES = 128

RIVALS = (
    Rival("recall_at_k", "dense", dense_recall_at_k, lambda n, p: (2 * p + 5) * n * n),
    Rival("recall_at_k", "dense-compiled", compiled(dense_recall_at_k), lambda n, p: 6 * n * n),
    Rival(
        "recall_at_k",
        "query-loop",
        loop_recall_at_k,
        lambda n, p: (2 * p + 5) * n * n,
        sample=functools.partial(loop_recall_at_k, queries=SAMPLED_QUERIES),
    ),
    Rival("smooth_ap", "dense", dense_smooth_ap, lambda n, p: (2 * p + 5) * n * n),
    Rival("smooth_ap", "dense-compiled", compiled(dense_smooth_ap), lambda n, p: 6 * n * n),
    Rival(
        "smooth_ap",
        "pml",
        library_smooth_ap,
        lambda n, p: 5.5 * n**3,
        differs="other ranks: takes rows as class by class, as many classes as members",
    ),
    Rival("fast_ap", "dense", dense_fast_ap, lambda n, p: (3 * (BINS + 1) + 4) * n * n),
    Rival("fast_ap", "dense-compiled", compiled(dense_fast_ap), lambda n, p: 6 * n * n),
    Rival("fast_ap", "pml", library_fast_ap, lambda n, p: (4 * (BINS + 1) + 7) * n * n),
    Rival("rambo_recall", "sorted-rows", sorted_rambo_recall, lambda n, p: 12 * n * n),
    Rival("rambo_ap", "sorted-rows", sorted_rambo_ap, lambda n, p: 12 * n * n),
)


UNROLLED = 16
"""Up to so many relevant items a tile function repeats itself for each, so that scores are read once for all."""
TILE_SCORES, TILE_ROWS = 2**27, 2048
"""Scores that exist at once in a formulation by row chunks, half a gigabyte of float32, unless fewer rows than these
would leave the products short of work."""
PAIR_NUMBERS = 2**26
"""Coordinates of relevant items that are gathered at once."""


def sigmoid_count(scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Of scores [B, N] against thresholds [B, P]: sums of sigmoids, and of their slopes, [B, P] each."""
    if own.shape[1] > UNROLLED:
        ahead = torch.sigmoid((scores[:, None, :] - own[:, :, None]) / TAU_RANK)
        return ahead.sum(2), (ahead - ahead * ahead).sum(2) / TAU_RANK
    columns = [torch.sigmoid((scores - one) / TAU_RANK) for one in own.split(1, 1)]
    slopes = [(ahead - ahead * ahead).sum(1) / TAU_RANK for ahead in columns]
    return torch.stack([ahead.sum(1) for ahead in columns], 1), torch.stack(slopes, 1)


def sigmoid_pull(scores: Tensor, own: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N] gradient of the sums of sigmoids, weighted [B, P]."""
    if own.shape[1] > UNROLLED:
        ahead = torch.sigmoid((scores[:, :, None] - own[:, None, :]) / TAU_RANK)
        return ((ahead - ahead * ahead) * weights[:, None, :]).sum(2).div(TAU_RANK).to(dtype)
    gradient = torch.zeros_like(scores)
    for one, weight in zip(own.split(1, 1), weights.split(1, 1), strict=True):
        ahead = torch.sigmoid((scores - one) / TAU_RANK)
        gradient = gradient + (ahead - ahead * ahead) * (weight / TAU_RANK)
    return gradient.to(dtype)


def ramp_count(scores: Tensor, own: Tensor) -> tuple[Tensor, None]:
    """[B, bins + 1] cumulative histogram of FastAP, which is compared with no relevant item."""
    position = (1 - scores) * (BINS / 2)
    return torch.stack([(end - position).clamp(0, 1).sum(1) for end in range(1, BINS + 2)], 1), None


def ramp_pull(scores: Tensor, own: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N] gradient of the cumulative histogram: a score lies on the ramp of one bin at most."""
    position = (1 - scores) * (BINS / 2)
    gradient = torch.zeros_like(scores)
    for end, weight in enumerate(weights.split(1, 1), 1):
        gradient = torch.where((end - position > 0) & (end - position < 1), weight * (BINS / 2), gradient)
    return gradient.to(dtype)


def step_count(scores: Tensor, own: Tensor) -> Tensor:
    """[B, P] how many scores reach each threshold."""
    if own.shape[1] > UNROLLED:
        return (scores[:, None, :] >= own[:, :, None]).sum(2, dtype=torch.int32)
    return torch.stack([(scores >= one).sum(1, dtype=torch.int32) for one in own.split(1, 1)], 1)


def step_pull(scores: Tensor, own: Tensor, moved: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, N] by how many ranks each score falls when the thresholds move, and how many reach the moved ones."""
    if own.shape[1] > UNROLLED:
        before, after = own[:, None, :] > scores[:, :, None], moved[:, None, :] > scores[:, :, None]
        return (after.to(scores.dtype) - before.to(scores.dtype)).sum(2).to(dtype), step_count(scores, moved)
    gradient = torch.zeros_like(scores)
    for one, other in zip(own.split(1, 1), moved.split(1, 1), strict=True):
        gradient = gradient + ((other > scores).to(scores.dtype) - (one > scores).to(scores.dtype))
    return gradient.to(dtype), step_count(scores, moved)


@dataclass(frozen=True)
class Tiles:
    """What is done to the scores of a row chunk, forward and backward; `steepest` bounds the slope of one count."""

    count: Callable[[Tensor, Tensor], Any]
    pull: Callable[[Tensor, Tensor, Tensor, torch.dtype], Any]
    steepest: float

    def under_compile(self) -> "Tiles":
        return Tiles(compiled(self.count), compiled(self.pull), self.steepest)


SIGMOID_TILES = Tiles(sigmoid_count, sigmoid_pull, 0.25 / TAU_RANK)
RAMP_TILES = Tiles(ramp_count, ramp_pull, BINS / 2)
STEP_TILES = Tiles(step_count, step_pull, 1.0)


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
    low: Tensor, relevant: Tensor, d_own: Tensor, scale: Tensor, gradient_of: Callable[[slice, Tensor], Tensor]
) -> Tensor:
    """Gradient of the embeddings, from that of chunks of scores (divided by `scale`) and that of the relevant scores.

    The relevant scores get theirs in float32: it is a sum over a whole row and would leave the range of float16 where
    the gradients of single scores fill it.
    """
    count, dim = low.shape
    gradient = torch.zeros(low.shape, dtype=d_own.dtype, device=low.device)
    for rows in _row_chunks(count, count, TILE_SCORES, TILE_ROWS):
        tile = gradient_of(rows, _score_chunk(low, rows))
        gradient[rows] += _product(tile, low)
        gradient += _product(tile.T, low[rows])
    gradient *= scale
    for rows in _row_chunks(count, relevant.shape[1] * dim, PAIR_NUMBERS):
        near, weight = low[relevant[rows]].to(d_own.dtype), d_own[rows]
        gradient[rows] += (weight[:, None, :] @ near)[:, 0]
        from_query = weight[:, :, None] * low[rows][:, None, :].to(d_own.dtype)
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
            own = scores.gather(1, relevant[rows])  # of the same rounded numbers as what they are compared with
            parts.append((*tiles.count(scores, own), own))
        counts, own = torch.cat([part[0] for part in parts]), torch.cat([part[2] for part in parts])
        slopes = None if parts[0][1] is None else torch.cat([part[1] for part in parts])
        ctx.save_for_backward(low, relevant, own, slopes)
        ctx.tiles = tiles
        return counts, own

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        low, relevant, own, slopes = ctx.saved_tensors
        d_counts, d_own = outputs
        if slopes is not None:
            d_own = d_own - d_counts * slopes
        # the largest number that a gradient of a score can be, brought to where float16 has room
        scale = d_counts.abs().sum(1).amax().mul(ctx.tiles.steepest / 2**14).clamp(min=1e-30)
        weights = d_counts / scale

        def gradient_of(rows: slice, scores: Tensor) -> Tensor:
            pulled: Tensor = ctx.tiles.pull(scores, own[rows], weights[rows], low.dtype)
            return pulled

        return _embedding_gradient(low, relevant, d_own, scale, gradient_of), None, None, None


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
            own = scores.gather(1, relevant[rows]) - margin
            parts.append((tiles.count(scores.scatter_(1, relevant[rows], -torch.inf), own), own))
        counts, own = (torch.cat(part) for part in zip(*parts, strict=True))
        positive_rank = _place_among_relevant(own)
        loss, slope = _rambo_terms((counts + positive_rank).to(own.dtype), positive_rank, recall)
        length = len(low) - 1
        moved = own + slope * (lam * length / slope.numel())
        ctx.save_for_backward(low, relevant, counts, own, moved)
        ctx.tiles, ctx.scale = tiles, 1 / (lam * length)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        low, relevant, counts, own, moved = ctx.saved_tensors
        scale = outputs[0] * ctx.scale
        d_own = torch.empty_like(own)

        def gradient_of(rows: slice, scores: Tensor) -> Tensor:
            scores.scatter_(1, relevant[rows], -torch.inf)
            pulled: Tensor
            pulled, reached = ctx.tiles.pull(scores, own[rows], moved[rows], low.dtype)
            fallen = _place_among_relevant(moved[rows]) - _place_among_relevant(own[rows])
            d_own[rows] = (reached - counts[rows] + fallen) * scale
            return pulled

        gradient = _embedding_gradient(low, relevant, d_own, scale, gradient_of)
        return gradient, None, None, None, None, None, None


def _place_among_relevant(own: Tensor) -> Tensor:
    return (own[:, None, :] >= own[:, :, None]).sum(2)


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
        count, own = counts(embeddings, labels, per_class)
        positive_rank = 0.5 + ((own[:, None, :] - own[:, :, None]) / TAU_RANK).sigmoid_().sum(2)
        return 1 - (positive_rank / (0.5 + count)).mean()

    def fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        total, own = counts(embeddings, labels, per_class)
        return fast_ap_from(total, (1 - own).clamp(0, 2) * (BINS / 2))

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


def two_sorts_ap(scores: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """RaMBO's AP loss of one list [n] and its gradient: two sorts, ranks by a scatter, in integers."""
    length = len(scores)
    places = torch.arange(1, length + 1, device=scores.device, dtype=torch.int32)
    order = scores.argsort(descending=True)
    rank = torch.empty_like(places).scatter_(0, order, places)
    positive_rank = torch.empty_like(places).scatter_(0, order, relevance[order].cumsum(0, dtype=torch.int32))
    total = relevance.sum()
    precision = positive_rank.to(scores.dtype) / rank * relevance
    moved = scores + precision / rank * (AP_LAM * length / total)
    del positive_rank, order
    order = moved.argsort(descending=True)
    fallen = torch.empty_like(places).scatter_(0, order, places).sub_(rank)
    return 1 - precision.sum() / total, fallen.to(scores.dtype) / (AP_LAM * length)


def six_argsorts_ap(scores: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The same as the published code has it: a ranking is two argsorts, and there are three of them, in floats."""

    def ranking(values: Tensor) -> Tensor:
        return (torch.argsort(torch.argsort(values).flip(0)) + 1).to(scores.dtype)

    length, relevant = len(scores), relevance.to(scores.dtype)
    total = relevant.sum()
    rank = ranking(scores)
    positive_rank = ranking(-rank + 2.0 * length * relevant)
    precision = positive_rank / rank * relevant
    lam = AP_LAM * length
    return 1 - precision.sum() / total, (ranking(scores + precision / rank * (lam / total)) - rank) / lam
