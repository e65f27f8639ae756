"""What tiles are compared with: exact counting against a row of thresholds, without sorting what is counted.

Few thresholds are compared one after another. Many are sorted once, and a monotone map cuts the line of scores into many
more buckets than thresholds: a bucket that holds no threshold answers for every score in it, and only a score that
shares its bucket with thresholds is searched among these. That is O(Z + P log P) a row where the thresholds spread over
the buckets and O(Z log P) where they do not. The map may round as it likes: it is the same for scores and thresholds
and never turns their order around, so that every answer is the exact integer.

Dimension letters:  B rows   P thresholds of a row   Z scores of a row
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Up to here one comparison per threshold beats the table; measured on a CPU, in forward and backward.
FEW_THRESHOLDS = 16

# Comparisons of a tile that are made at once: 2**16 float32 are 256 KiB.
ALL_AT_ONCE = 2**16

# Buckets of a threshold, and most buckets of all rows: 8 MiB, which stay in a CPU's last cache.
BUCKETS_EACH = 16
MOST_BUCKETS = 2**21

# Thresholds that every search in a bucket looks through; the few that find all of them above go on. One less than a power of 2.
ORDINARY = 7

# Scores that pass through the table together: 1 MiB of float32, in a core's cache, or 64 MiB where launches cost more.
BLOCK_ON_CPU = 2**18
BLOCK = 2**24


@dataclass(frozen=True)
class Buckets:
    """The monotone map: buckets of a row from the highest score down, the outer two beyond all thresholds it was made for."""

    top: Tensor  # [B, 1] highest finite threshold
    per_score: Tensor  # [B, 1] buckets per unit of score, negative
    per_row: int

    @classmethod
    def of(cls, thresholds: Tensor) -> "Buckets":
        rows, width = thresholds.shape
        per_row = max(min(BUCKETS_EACH * width, MOST_BUCKETS // rows), 4)
        limits = torch.finfo(thresholds.dtype)
        finite = thresholds.isfinite()
        top = torch.where(finite, thresholds, limits.min).amax(dim=1, keepdim=True)
        bottom = torch.where(finite, thresholds, limits.max).amin(dim=1, keepdim=True)
        # the quotient may be 0 or infinite, and 0 times infinity is no bucket
        per_score = ((3 - per_row) / (top - bottom).abs()).clamp(-limits.max, -limits.tiny)
        return cls(top, per_score, per_row)

    def __call__(self, scores: Tensor) -> Tensor:
        """[B * Z] int32 bucket of each score, counted through all rows."""
        position = (scores - self.top).mul_(self.per_score).clamp_(-1, self.per_row - 2).add_(1)
        bucket = position.to(torch.int32).clamp_(min=0)  # a NaN may land anywhere inside
        if len(scores) > 1:
            bucket += torch.arange(0, len(scores) * self.per_row, self.per_row, dtype=torch.int32, device=scores.device)[
                :, None
            ]
        return bucket.view(-1)


@dataclass(frozen=True)
class BucketTable:
    """What a bucket knows of the thresholds of its row: how many lie above it, and whether it holds any.

    A position is an index into `sorted_thresholds`, where the rows follow one another in descending order.
    """

    position: (
        Tensor  # [B * buckets] int32 position of the first threshold that is not above the bucket, inverted where it holds any
    )
    sorted_thresholds: Tensor  # [B * stride] a row ends with NaN, which is above nothing, as far as a search can reach
    stride: int
    steps: list[int]  # of a search in an ordinary bucket, which finds at most their sum
    far_steps: list[int]  # of a search that goes on from there in the fullest bucket

    @classmethod
    def of(cls, descending: Tensor, buckets: Buckets) -> "BucketTable":
        rows, width = descending.shape
        home = buckets(descending).long()
        held = torch.zeros(rows * buckets.per_row, dtype=torch.int32, device=descending.device)
        held.scatter_add_(0, home, torch.ones((), dtype=torch.int32, device=descending.device).expand_as(home))
        steps, far_steps = _steps(min(int(held.max()), ORDINARY)), _steps(max(int(held.max()) - ORDINARY, 0))
        reach = sum(steps) + sum(far_steps)
        position = held.cumsum(0, dtype=torch.int32).sub_(held)
        if rows > 1:
            position.view(rows, -1).add_(torch.arange(0, rows * reach, reach, dtype=torch.int32, device=held.device)[:, None])
        position.bitwise_xor_(held.clamp_(max=1).neg_())
        sorted_thresholds = torch.nn.functional.pad(descending, (0, reach), value=torch.nan).view(-1)
        return cls(position, sorted_thresholds, width + reach, steps, far_steps)

    def search(self, position: Tensor, scores: Tensor) -> Tensor:
        """Exact positions from those of the buckets. Thresholds of later buckets are not above, so a search needs no end."""
        first = torch.maximum(position, ~position)
        position = self._binary_search(first.clone(), scores, self.steps)
        if self.far_steps:
            far = (position.sub(first) == ORDINARY).nonzero().view(-1)
            position.index_copy_(
                0, far, self._binary_search(position.index_select(0, far), scores.index_select(0, far), self.far_steps)
            )
        return position

    def _binary_search(self, position: Tensor, scores: Tensor, steps: list[int]) -> Tensor:
        for step in steps:
            position.add_(self.sorted_thresholds[step - 1 :].index_select(0, position) > scores, alpha=step)
        return position


def _steps(most: int) -> list[int]:
    """Powers of two of which some sum up to any number of at most `most`."""
    return [1 << bit for bit in reversed(range(most.bit_length()))]


class Thresholds:
    """Rows of thresholds [B, P], asked about tiles of scores [B, Z]. Answers are exact integers whatever the order.

    `keep`: there is only one tile, so that a few comparisons with it may be kept for `crossings`.
    """

    def __init__(self, values: Tensor, unperturbed: "Thresholds | None" = None, *, keep: bool = False) -> None:
        self.values, self.unperturbed, self.keep = values, unperturbed, keep
        self.kept: Tensor | None = None
        self.found: Tensor | None = None  # [B, P] ranks that the kernels made of the counts, kept for the backward pass
        self.few = values.shape[1] <= FEW_THRESHOLDS

    def perturbed(self, values: Tensor) -> "Thresholds":
        """The same thresholds at other values, with the buckets of these."""
        return Thresholds(values, unperturbed=self)

    @cached_property
    def columns(self) -> Tensor:
        """[P, B]: a threshold is contiguous over rows, in both roles of a tile."""
        return self.values.t().contiguous()

    @cached_property
    def descending(self) -> tuple[Tensor, Tensor]:
        """[B, P] values and where they come from; of equal ones the first comes first."""
        return self.values.sort(dim=1, descending=True, stable=True)

    @cached_property
    def ranks(self) -> Tensor:
        """[B, P] int32 rank of each threshold in its row, 1 for the highest; of equal ones the first is ahead."""
        positions = torch.arange(1, self.values.shape[1] + 1, dtype=torch.int32, device=self.values.device)
        return self.unsorted(positions.expand_as(self.values))

    def unsorted(self, ordered: Tensor) -> Tensor:
        """[B, P] in the order of the values what is in `descending` order."""
        return torch.empty_like(ordered, memory_format=torch.contiguous_format).scatter_(1, self.descending[1], ordered)

    @cached_property
    def buckets(self) -> Buckets:
        return Buckets.of(self.values) if self.unperturbed is None else self.unperturbed.buckets

    @cached_property
    def table(self) -> BucketTable:
        values, order = self.descending
        table = BucketTable.of(values, self.buckets)
        # the table holds the sorted values too, and one copy of them is enough
        self.descending = table.sorted_thresholds.view(len(values), -1)[:, : values.shape[1]], order
        return table

    def num_reaching(self, tile: Tensor) -> Tensor:
        """[B, P] int32: how many scores of the row are at or above each threshold."""
        if self.few and self.is_small(tile):
            above = self.all_above(tile)
            self.kept = above if self.keep else None
            return tile.shape[1] - above.sum(dim=2).t().int()
        if self.few:
            return self.num_reaching_from([above.sum(dim=1) for above in self.compared(tile)], tile)
        positions = torch.empty(tile.shape, dtype=torch.int32, device=tile.device)
        for columns, (position,) in _positions(tile, self):
            positions[:, columns] = position
        return self.tally(positions)

    def above(self, tile: Tensor) -> Tensor:
        """[B, Z] in the tile's dtype: how many thresholds of the row lie above each score."""
        total = torch.zeros_like(tile)
        if self.few:
            for above in self.compared(tile):
                total += above
        else:
            for columns, (position,) in _positions(tile, self):
                total[:, columns] = position.sub_(self.row_starts)
        return total

    def crossings(self, perturbed: "Thresholds", tile: Tensor) -> tuple[Tensor, Tensor]:
        """How the answers change when the thresholds move to `perturbed`, which must be `self.perturbed(...)`.

        [B, Z] in the tile's dtype how many more of the row are above each score, and `perturbed.num_reaching(tile)`.
        """
        if self.few and self.is_small(tile):
            after = perturbed.all_above(tile)
            num_reaching = tile.shape[1] - after.sum(dim=2).t().int()
            before = self.all_above(tile) if self.kept is None else self.kept
            return after.sub_(before).sum(dim=0), num_reaching
        change = torch.zeros_like(tile)
        if self.few:
            below = []
            for above in perturbed.compared(tile):
                change += above
                below.append(above.sum(dim=1))
            for above in self.compared(tile):
                change -= above
            return change, perturbed.num_reaching_from(below, tile)
        positions = torch.empty(tile.shape, dtype=torch.int32, device=tile.device)
        offset = perturbed.row_starts - self.row_starts
        for columns, (before, after) in _positions(tile, self, perturbed):
            positions[:, columns] = after
            change[:, columns] = after.sub_(before).sub_(offset)
        return change, perturbed.tally(positions)

    def is_small(self, tile: Tensor) -> bool:
        """Whether all comparisons with a tile may exist at once, which takes fewer operations."""
        return self.values.shape[1] * tile.numel() <= ALL_AT_ONCE

    def all_above(self, tile: Tensor) -> Tensor:
        """[P, B, Z] 1 where a threshold is above the score."""
        return torch.gt(self.columns[:, :, None], tile, out=tile.new_empty(self.columns.shape[0], *tile.shape))

    def compared(self, tile: Tensor) -> Iterator[Tensor]:
        """[B, Z] for every threshold 1 where it is above the score, all in the same memory."""
        above = torch.empty_like(tile)
        for column in self.columns:
            yield torch.gt(column[:, None], tile, out=above)

    def num_reaching_from(self, below: list[Tensor], tile: Tensor) -> Tensor:
        """[B, P] int32 scores that reach each threshold, from those below it; a float counts a tile of up to 2**24 exactly."""
        rows, width = tile.shape
        return width - torch.stack(below, dim=1).int() if below else self.values.new_zeros(rows, 0, dtype=torch.int32)

    @cached_property
    def row_starts(self) -> Tensor:
        """[B, 1] int32 where the rows begin in `table.sorted_thresholds`."""
        stride = self.table.stride
        return torch.arange(0, len(self.values) * stride, stride, dtype=torch.int32, device=self.values.device)[:, None]

    def tally(self, positions: Tensor) -> Tensor:
        """[B, P] int32 scores that reach each threshold, from the positions of all scores."""
        rows, width = self.values.shape
        tally = torch.bincount(positions.view(-1), minlength=rows * self.table.stride).view(rows, -1)[:, :width]
        # a score reaches the threshold at its position and all after it
        return self.unsorted(tally.cumsum(dim=1, dtype=torch.int32))


@dataclass(frozen=True)
class DescendingCounts:
    """Scores that reach each threshold, in descending order of the thresholds."""

    thresholds: Thresholds
    values: Tensor  # [B, P]

    def unsorted(self) -> Tensor:
        """[B, P] in the order of the thresholds."""
        return self.thresholds.unsorted(self.values)


def _positions(tile: Tensor, *sets: Thresholds) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of columns, and for every set, all with the same buckets, the [B, z] int32 positions of their scores.

    The position of a score is that of the first threshold that is not above it.
    """
    rows, width = tile.shape
    step = max((BLOCK_ON_CPU if tile.device.type == "cpu" else BLOCK) // rows, 1)
    for start in range(0, width, step):
        columns = slice(start, start + step)
        scores = tile[:, columns].contiguous()
        bucket = sets[0].buckets(scores)
        positions = [t.table.position.index_select(0, bucket) for t in sets]
        occupied = (positions[0] if len(positions) == 1 else positions[0] | positions[1]) < 0
        shared = occupied.nonzero().view(-1)
        searched = scores.view(-1).index_select(0, shared)
        for position, t in zip(positions, sets, strict=True):
            position.index_copy_(0, shared, t.table.search(position.index_select(0, shared), searched))
        yield columns, [position.view(scores.shape) for position in positions]


def smallest_step(like: Tensor) -> float:
    """A sigmoid too small to change a sum with 1, whose product with a weight is not subnormal unless that is negligible."""
    return torch.finfo(like.dtype).eps ** 2


@dataclass
class SigmoidThresholds:
    """The scores of the positives, and for a batch of one tile the comparisons, kept for the backward pass."""

    columns: Tensor  # [P, B]: a threshold is contiguous over queries in both roles of a tile
    keep: bool = False
    exponentials: Tensor | None = None  # [P, B, 1] e^-threshold, where tiles hold e^-score
    tile: Tensor | None = None  # [P, B, Z] comparisons with the tile
    among: Tensor | None = None  # [B, P, P] of the positives with each other

    @cached_property
    def bounds(self) -> list[tuple[Tensor, Tensor]]:
        """Each threshold's e^-threshold [B, 1], and the largest e^-score that it is compared with: its sigmoid is eps**2."""
        assert self.exponentials is not None, "tiles hold scores"
        return list(
            zip(self.exponentials.unbind(), (self.exponentials / smallest_step(self.exponentials)).unbind(), strict=True)
        )

    @cached_property
    def extent(self) -> tuple[float, float]:
        """The lowest and the highest threshold, of none (inf, -inf)."""
        if not self.columns.numel():
            return math.inf, -math.inf
        padding = self.columns == torch.inf
        return self.columns.amin().item(), self.columns.masked_fill(padding, -torch.inf).amax().item()
