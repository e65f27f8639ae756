"""The embedding door of the fused kernels: what is launched, over which rows, and what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from rankgrad.ops.rankers import Blackbox, Exact, Histogram, Ranker, Relevant, Sigmoid
from rankgrad.ops.relevance import LabelLists
from rankgrad.ops.triton import embedding_kernels
from rankgrad.ops.triton.operands import TILE, WIDEST, Operands, Precision, add_product, padded, scale_of

# Tiles and schedules, best first, found by timing on an H200: an entry holds the shared memory it needs. A counting tile is
# wider than a gradient tile, which needs registers for scores, powers and sums at once. They are not tuned at run time: to
# compile one more candidate takes longer than a training step gains from it in a thousand calls.
Tiles: TypeAlias = Sequence[tuple[int, dict[str, int]]]
COUNT_TILES: Tiles = (
    (190_000, {"BM": TILE, "BN": WIDEST, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
SPLIT_COUNT_TILES: Tiles = (
    (150_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 2}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
PULL_TILES: Tiles = (
    (125_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 4}),
    (99_000, {"BM": TILE, "BN": TILE // 4, "BK": 64, "num_warps": 4, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 2}),
)
SPLIT_PULL_TILES: Tiles = (
    (125_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 4}),
    (99_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 2}),
    (0, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 2}),
)
STRIPE = 8

# From here on comparisons with relevant items are the larger part of a tile's work, and smaller tiles hide more of it behind
# the products; those with the edges of bins are too cheap for that.
MANY_COMPARISONS = 8

# Relevant pairs, padding included, below which all queries are one group: an objective then is one pass of small launches.
ONE_GROUP = 2**22

# Most rows of the score gradient that exist at once, and most bytes of them: fewer rows leave an H200 idle in a product
# with 512 columns, 4 GiB are their share of memory at a million candidates.
CHUNK_ROWS = 4096
CHUNK_BYTES = 2**32

# The gradient of scores is scaled so that its largest possible entry is here; float16 ends at 65,504.
GRADIENT_PEAK = 2.0**14


def tile_for(tiles: Tiles, device: torch.device) -> dict[str, int]:
    """The first tile whose needs the device meets."""
    if device.type != "cuda":
        return tiles[0][1]
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return next(tile for needed, tile in tiles if memory >= needed)


def supports(ranker: Ranker) -> bool:
    """Whether the kernels know this ranker."""
    return isinstance(ranker, (Exact, Sigmoid, Histogram)) or (isinstance(ranker, Blackbox) and not ranker.margin_noise)


def rounded_width(most: int) -> int:
    """Relevant items of a query, rounded up to one of 4 steps an octave so that few groups cover ragged classes."""
    step = 1 << max(most.bit_length() - 3, 0)
    return -(-most // step) * step


@dataclass(frozen=True)
class FusedLayout:
    """Queries in groups of whole tiles with about as many relevant items."""

    lists: LabelLists
    groups: list[slice]
    widths: list[int]

    @classmethod
    def of(cls, lists: LabelLists, device: torch.device) -> "FusedLayout":
        queries = len(lists.query_order)
        short = -queries % TILE
        per_tile = torch.nn.functional.pad(lists.num_relevant, (0, short)).view(-1, TILE).amax(dim=1).tolist()
        if queries * max(per_tile) <= ONE_GROUP:
            # rounded like the width of a captured call, so that both sum in the same order
            return cls(lists.to(device), [slice(0, queries)], [rounded_width(max(per_tile))])
        groups: list[slice] = []
        widths: list[int] = []
        for tile, most in enumerate(per_tile):
            width, stop = rounded_width(most), min((tile + 1) * TILE, queries)
            if widths and widths[-1] == width:
                groups[-1] = slice(groups[-1].start, stop)
            else:
                groups.append(slice(tile * TILE, stop))
                widths.append(width)
        return cls(lists.to(device), groups, widths)

    @cached_property
    def spans(self) -> Tensor:
        """[4, Q] int32 start, stop, own and number of relevant candidates, as the kernels read them."""
        lists = self.lists
        return torch.stack((lists.start, lists.stop, lists.own, lists.num_relevant)).int()

    @cached_property
    def offsets(self) -> Tensor:
        """[Q] where a query begins when the relevant pairs of all groups, padding included, are one row-major array."""
        parts, begin = [], 0
        for group, width in zip(self.groups, self.widths, strict=True):
            rows = group.stop - group.start
            parts.append(torch.arange(rows, device=self.lists.start.device) * width + begin)
            begin += rows * width
        return torch.cat(parts)


class FusedDoor:
    """Opened with queries and candidates in float32, or with one set of embeddings in both roles (`candidates` None)."""

    def __init__(
        self, queries: Tensor, candidates: Tensor | None, layout: FusedLayout, precision: Precision, unit: bool
    ) -> None:
        self.layout, self.precision = layout, precision
        self.lists = lists = layout.lists
        self.chunks, self.order = layout.groups, lists.query_order
        self.mirrored = candidates is None
        self.bases: tuple[Tensor, ...] = (queries,) if candidates is None else (queries, candidates)
        others = queries if candidates is None else candidates
        mean = others.mean(dim=0) if precision == "fast" else others[0]
        self.queries = Operands.of(queries, lists.query_order, mean, scale_of(queries, unit), precision)
        self.candidates = (
            self.queries
            if candidates is None
            else Operands.of(others, lists.candidate_order, mean, scale_of(others, unit), precision)
        )
        self.num_candidates = len(lists.candidate_order)
        self.units: dict[float, tuple[Tensor, Tensor, Tensor]] = {}
        self.slopes: list[Tensor] = []
        self.centres: list[Tensor] = []
        self.asm = queries.is_cuda

    def _count_tile(self, width: int) -> dict[str, int]:
        return self._tile(COUNT_TILES, SPLIT_COUNT_TILES, width)

    def _tile(self, tiles: Tiles, split_tiles: Tiles, width: int) -> dict[str, int]:
        if self.precision == "high":
            return tile_for(split_tiles, self.order.device)
        return tile_for(tiles[width >= MANY_COMPARISONS :], self.order.device)

    def relevant(self, chunk: int) -> Relevant:
        rows, width = self.chunks[chunk], self.layout.widths[chunk]
        count = rows.stop - rows.start
        scores = torch.full((width, count), torch.inf, device=self.order.device)
        if width:
            embedding_kernels.relevant_kernel[(triton.cdiv(count, TILE),)](
                *self._operands(1.0),
                *self.layout.spans,
                scores,
                rows.start,
                count,
                width,
                **self._shape,
                **self._count_tile(width),
            )
        num_relevant = self.lists.num_relevant[rows]
        return Relevant(
            scores=scores.t().contiguous(),  # objectives work on rows
            valid=torch.arange(width, device=self.order.device) < num_relevant[:, None],
            gains=None,
            num_relevant=num_relevant,
            list_length=self.lists.list_length[rows],
            rank_dtype=torch.float32,
            fused=True,
        )

    def _operands(self, unit: float) -> tuple[Tensor, ...]:
        """What makes a score, in multiples of 1 / unit."""
        if unit not in self.units:
            q, c = self.queries, self.candidates
            self.units[unit] = (q.row_bias * unit, c.column_bias * unit, unit / (q.scale * c.scale))
        return self.queries.as_query, self.candidates.as_candidate, *self.units[unit]

    @property
    def _shape(self) -> dict[str, Any]:
        return {"SPLIT": self.precision == "high", "D": self.queries.as_query.shape[1]}

    @property
    def _constants(self) -> dict[str, Any]:
        return {"KEEP_OWN": self.lists.own_is_ranked, "ASM": self.asm, **self._shape}

    def count(self, ranker: Ranker, prepared: list[Any], seed: int) -> list[Tensor]:
        self.slopes, self.centres = [], []
        counts = []
        for chunk, rows in enumerate(self.chunks):
            comparisons, mode, unit = self._comparisons(ranker, prepared[chunk], rows)
            width = ranker.bins if isinstance(ranker, Histogram) else self.layout.widths[chunk]
            counts.append(self._count(rows, comparisons, width, mode, unit))
        return counts

    def _comparisons(self, ranker: Ranker, prepared: Any, rows: slice) -> tuple[Tensor, Any, float]:
        """[E, rows] what scores are compared with, the kernel's mode, and the unit of scores."""
        if isinstance(ranker, Sigmoid):
            unit = 1.4426950408889634 / ranker.tau  # of base 2
            return prepared * unit, embedding_kernels.SIGMOID, unit
        if isinstance(ranker, Histogram):
            unit = 1 / ranker.width
            # the first edge; the kernel knows the others
            return torch.full((1,), ranker.high * unit - 1, device=self.order.device), embedding_kernels.RAMP, unit
        return prepared.columns, embedding_kernels.STEP, 1.0

    def _count(self, rows: slice, comparisons: Tensor, width: int, mode: Any, unit: float) -> Tensor:
        count = rows.stop - rows.start
        sigmoid = mode == embedding_kernels.SIGMOID
        tile = self._count_tile(0 if mode == embedding_kernels.RAMP else width)
        row_tiles, panels = triton.cdiv(count, TILE), triton.cdiv(self.num_candidates, tile["BN"])
        # enough programs for two waves on a large GPU; splits are summed in a fixed order
        per_split = triton.cdiv(panels, max(1, min(panels, 264 // row_tiles)))
        splits = triton.cdiv(panels, per_split)
        dtype = torch.int32 if mode == embedding_kernels.STEP else torch.float32
        sums = torch.zeros((1 + sigmoid, splits, width, count), dtype=dtype, device=comparisons.device)
        centres = torch.zeros(count if sigmoid else 1, device=comparisons.device)
        if width:
            embedding_kernels.count_kernel[(row_tiles, splits)](
                *self._operands(unit), *self.layout.spans, comparisons, sums[0], sums[-1], centres,
                rows.start, count, self.num_candidates, width, per_split,
                MODE=mode, **self._constants, **tile,
            )  # fmt: skip
        total = sums.sum(dim=1)
        if sigmoid:
            self.slopes.append(total[1])
            self.centres.append(centres)
        return total[0].t().contiguous()

    def pull(self, ranker: Ranker, prepared: list[Any], aimed: list[Any], seed: int) -> list[Tensor | None]:
        sides = [self._side(ranker, chunk, prepared[chunk], aimed[chunk]) for chunk in range(len(self.chunks))]
        peak = torch.stack([side.peak for side in sides]).amax().clamp(min=1e-30)
        self.gradient_scale = GRADIENT_PEAK / (peak * (2 if self.mirrored else 1))
        for side in sides:
            side.rescale(self.gradient_scale)
        unit = self._comparisons(ranker, prepared[0], self.chunks[0])[2]
        self.products = [torch.zeros(padded(len(base), TILE), base.shape[1], device=base.device) for base in self.bases]
        memory = self._gradient_memory()
        for index, rows in enumerate(self.chunks):
            self._pull_group(sides, index, rows, unit, memory)
        if isinstance(ranker, Sigmoid):
            return [-(aim[0] * slopes).t() for aim, slopes in zip(aimed, self.slopes, strict=True)]
        return [None if side.reached is None else side.reached.t() for side in sides]

    def _side(self, ranker: Ranker, chunk: int, prepared: Any, aimed: Any) -> "PullSide":
        rows = self.chunks[chunk]
        if isinstance(ranker, Sigmoid):
            comparisons, mode, _ = self._comparisons(ranker, prepared, rows)
            return PullSide(mode, comparisons, aimed[0], self.centres[chunk], None, aimed[0].abs().sum(dim=0).amax() / 4)
        if isinstance(ranker, Histogram):
            # the table as steps at the edges, from the lowest score up: below all edges the sum is exactly 0
            table = aimed[0].t()[:-1]  # [bins, rows]
            steps = torch.cat((-table[:1], table[:-1] - table[1:], table[-1:]))
            top = torch.full_like(steps[0], ranker.high / ranker.width)
            return PullSide(embedding_kernels.RAMP, top, steps, steps, None, table.abs().amax())
        perturbed, scale = aimed
        reached = torch.zeros(prepared.columns.shape, dtype=torch.int32, device=self.order.device)
        peak = scale.abs().amax() * max(prepared.columns.shape[0], 1)
        return PullSide(embedding_kernels.STEP, prepared.columns, perturbed.columns, scale[:, 0], reached, peak)

    def _gradient_memory(self) -> Tensor:
        """[1 or 2, rows of the score gradient that exist at once, candidates] in float16, for one chunk after the other."""
        parts = 2 if self.precision == "high" else 1
        candidates = padded(self.num_candidates, TILE)
        rows_that_fit = max(CHUNK_BYTES // (2 * candidates * parts) // TILE * TILE, TILE)
        rows = min(CHUNK_ROWS, rows_that_fit, padded(max(group.stop - group.start for group in self.chunks), TILE))
        return torch.empty(parts, rows, candidates, dtype=torch.float16, device=self.order.device)

    def _pull_group(self, sides: list["PullSide"], index: int, group: slice, unit: float, memory: Tensor) -> None:
        """All chunks of a group of queries: gradient tiles, then the library's products with them."""
        all_rows = len(self.order)
        size = memory.shape[1]
        operands = self._operands(unit)
        for begin in range(group.start, group.stop, size):
            end = min(begin + size, group.stop)
            first_column = begin if self.mirrored else 0
            width = (all_rows if self.mirrored else self.num_candidates) - first_column
            stride = padded(width, TILE)  # the library's products are slow where a length is odd
            buffers = [part.view(-1)[: (end - begin) * stride].view(end - begin, stride) for part in memory]
            side = sides[index]
            # columns of one set of embeddings are queries too, group by group; other candidates are one group
            for other, columns in enumerate(self.chunks if self.mirrored else [slice(0, self.num_candidates)]):
                start = max(columns.start, begin) if self.mirrored else 0
                if columns.stop <= start:
                    continue
                mirror = sides[other] if self.mirrored else side
                written = first_column + stride if columns.stop == first_column + width else columns.stop
                most = 0 if side.mode == embedding_kernels.RAMP else max(side.width, mirror.width)
                tile = self._tile(PULL_TILES, SPLIT_PULL_TILES, most)
                tiles = triton.cdiv(written - start, tile["BN"]) * triton.cdiv(end - begin, TILE)
                embedding_kernels.pull_kernel[(tiles,)](
                    *operands, *self.layout.spans,
                    side.comparisons, side.weights, side.extra, side.reached_or_any,
                    mirror.comparisons, mirror.weights, mirror.extra, mirror.reached_or_any,
                    buffers[0], buffers[-1],
                    group.start, group.stop - group.start, begin, end - begin,
                    columns.start, columns.stop - columns.start, start, written, self.num_candidates, stride,
                    side.width, mirror.width,
                    MODE=side.mode, MIRRORED=self.mirrored, GROUP=STRIPE, **self._constants, **tile,
                )  # fmt: skip
            self._multiply(buffers, begin, end)

    def _multiply(self, gradient: list[Tensor], begin: int, end: int) -> None:
        queries, candidates = self.queries.parts, self.candidates.parts
        if self.mirrored:
            _add_split_product(self.products[0][begin:end], gradient, [part[begin:] for part in candidates])
            if end < len(self.order):
                beyond = [g[:, end - begin :].t() for g in gradient]
                _add_split_product(self.products[0][end:], beyond, [part[begin:end] for part in queries])
        else:
            _add_split_product(self.products[0][begin:end], gradient, list(candidates))
            _add_split_product(self.products[1], [g.t() for g in gradient], [part[begin:end] for part in queries])

    def gradients(self, d_relevant: list[Tensor]) -> tuple[Tensor, ...]:
        flat = torch.cat([d.contiguous().view(-1) for d in d_relevant])
        lists, start, stop = self.lists, self.layout.spans[0], self.layout.spans[1]
        if self.mirrored:
            return (self._gather(2, 0, self.bases[0], lists.query_order, flat, start, stop, lists.query_order),)
        d_queries = self._gather(0, 0, self.bases[1], lists.candidate_order, flat, start, stop, lists.query_order)
        first, last = lists.query_runs()
        d_candidates = self._gather(
            1, 1, self.bases[0], lists.query_order, flat, first.int(), last.int(), lists.candidate_order
        )
        return d_queries, d_candidates

    def _gather(
        self,
        role: int,
        index: int,
        partners: Tensor,
        partner_order: Tensor,
        flat: Tensor,
        first: Tensor,
        last: Tensor,
        order: Tensor,
    ) -> Tensor:
        out = torch.empty_like(self.bases[index])
        items, d = out.shape
        other = self.candidates if role != 1 else self.queries
        block = min(1024, triton.next_power_of_2(d))
        embedding_kernels.gather_kernel[(items, triton.cdiv(d, block))](
            partners, partner_order, flat, self.layout.offsets, self.layout.spans[0], self.layout.spans[2], first, last,
            self.products[index], 1 / (self.gradient_scale * other.scale), order, out, d,
            ROLE=role, BD=block,
        )  # fmt: skip
        return out


class PullSide:
    """What a group of queries brings to the tiles of the score gradient."""

    def __init__(
        self, mode: Any, comparisons: Tensor, weights: Tensor, extra: Tensor, reached: Tensor | None, peak: Tensor
    ) -> None:
        self.width = weights.shape[0]
        if not self.width:  # the kernel reads ahead, and there must be something to read
            comparisons = weights = torch.zeros((1, weights.shape[1]), device=weights.device)
        self.mode, self.comparisons, self.weights = mode, comparisons, weights
        self.extra, self.reached, self.peak = extra, reached, peak

    @property
    def reached_or_any(self) -> Tensor:
        return self.comparisons if self.reached is None else self.reached  # not touched where nothing is counted

    def rescale(self, factor: Tensor) -> None:
        if self.mode == embedding_kernels.STEP:
            self.extra = self.extra * factor
        else:
            self.weights = (self.weights * factor).contiguous()


def _add_split_product(out: Tensor, gradient: list[Tensor], parts: list[Tensor]) -> None:
    """Out += gradient @ parts, with the low halves of both where there are any; that of the gradient is kept 2048 times."""
    add_product(out, gradient[0], parts[0])
    if len(gradient) > 1:
        add_product(out, gradient[0], parts[1])
        add_product(out, gradient[1], parts[0], alpha=1 / 2048)
