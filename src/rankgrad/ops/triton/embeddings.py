"""Scores of embeddings by the fused kernels: launches, and what is kept between the passes."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad._gpu import has_gpu
from rankgrad.ops.autograd import PositiveScores
from rankgrad.ops.pair_relevance import PairRelevance
from rankgrad.ops.relevance import EngineRelevance
from rankgrad.ops.thresholds import DescendingCounts
from rankgrad.ops.triton.bucket_tables import BucketTables
from rankgrad.ops.triton.descriptors import described
from rankgrad.ops.triton.embedding_gradient import EmbeddingGradient
from rankgrad.ops.triton.embedding_kernels import listed_positives_kernel, positives_kernel, scatter_kernel
from rankgrad.ops.triton.fused_scores import FusedScores
from rankgrad.ops.triton.grids import MOST_CELLS, QueryGrids, cells_of_unit_vectors
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.operands import Operands, Precision, operand_scale, padded
from rankgrad.ops.triton.passes import Passes
from rankgrad.ops.triton.query_groups import QueryGroups
from rankgrad.ops.triton.ranker_kernels import GRID, SIGMOID, num_buckets, root_of
from rankgrad.ops.triton.score_tiles import CUT_OFF, FLUSH
from rankgrad.ops.triton.stored_scores import StoredScores
from rankgrad.ops.triton.tiles import (
    BACKWARD_TILES,
    COUNT_BOTH_TILES,
    COUNT_TILES,
    DESCRIBED_TILE,
    SPLIT_BACKWARD_TILES,
    SPLIT_TILES,
    STORE_TILES,
    TILE,
    Tiles,
    takes_descriptors,
    tile_for,
)

# Positives of a query, on average and rounded up to 4 steps an octave, from which on it is faster to find the place of a
# candidate on a grid or among sorted positives than to compare it with each of them. 16,384 items on an H200, in ms, comparing
# and not: RS@k with 31 positives 9.2 and 10.1 ("high" 13.4 and 16.3), with 47 15.2 and 10.4 (19.2 and 16.8); RaMBO's AP with 15
# 7.5 and 12.1, with 31 in "high" 23.1 and 14.0.
GRID_FROM = 40
SEARCH_FROM = 24

# Tiles of candidates that a program adds to such places: few queries at a time, so that these stay in the cache.
TILES_EACH = 16

# The gradient of scores is scaled so that its largest possible entry is here; float16 ends at 65,504.
GRADIENT_PEAK = 2.0**14


@dataclass(frozen=True)
class EmbeddingSource:
    """Opens the fused kernels on embeddings."""

    layout: QueryGroups
    precision: Precision
    normalized: bool
    ops: Lowering[Any]

    @classmethod
    def of(
        cls,
        relevance: EngineRelevance,
        device: torch.device,
        precision: Precision,
        *,
        normalized: bool,
        ops: Lowering[Any],
        widths: Sequence[int] | None = None,
    ) -> "EmbeddingSource":
        """For `ops`. `widths`, the most and the mean positives of a query, avoid reading them from the device."""
        if widths is None:
            layout = QueryGroups.of(relevance, device)
        else:
            layout = QueryGroups(relevance, [slice(0, len(relevance.query_order))], [widths[0]], widths[1])
        return cls(layout, precision, normalized, ops)

    def __call__(self, queries: Tensor, candidates: Tensor | None = None) -> "FusedEmbeddingScores":
        layout, scale = self.layout, self.ops.threshold_scale
        return FusedEmbeddingScores(
            queries, candidates, layout, self.precision, normalized=self.normalized, threshold_scale=scale
        )

    @property
    def kinds(self) -> frozenset[Hashable]:
        """What the kernels are compiled for besides the shape of embeddings, for each number of positives."""
        r, mode = self.layout.relevance, _many_mode(self.ops, self.layout, normalized=self.normalized)
        settings = (self.ops.kind, str(mode), self.precision, self.normalized, type(r), r.rank_self, r.symmetric)
        return frozenset((*settings, width.bit_length()) for width in self.layout.widths)


def _many_mode(ops: Lowering[Any], layout: QueryGroups, *, normalized: bool) -> Any:
    """The MODE of `ops` for many positives, or None where it does not pay off or where a grid would not fit."""
    if ops.many_mode is None or layout.mean < (GRID_FROM if ops.many_mode == GRID else SEARCH_FROM):
        return None
    fits = normalized and cells_of_unit_vectors(ops.score_scale) <= MOST_CELLS
    return ops.many_mode if fits or ops.many_mode != GRID else None


class FusedEmbeddingScores:
    """Scores of queries and candidates in float32, or of one set of embeddings in both roles (`candidates` None).

    Positives are scored in multiples of 1 / threshold_scale. Where that is the scale of the tiles they are compared with,
    equal embeddings have equal scores to the last bit, so that ties are ties.
    """

    def __init__(
        self,
        queries: Tensor,
        candidates: Tensor | None,
        layout: QueryGroups,
        precision: Precision,
        *,
        normalized: bool,
        threshold_scale: float = 1.0,
    ) -> None:
        self.layout, self.precision, self.threshold_scale = layout, precision, threshold_scale
        self.relevance = relevance = layout.relevance
        self.row_blocks, self.query_order = layout.groups, relevance.query_order
        self.symmetric = candidates is None and relevance.symmetric
        queries = queries.contiguous()  # the kernels read whole rows
        others = queries if candidates is None else candidates.contiguous()
        self.bases = (queries,) if candidates is None else (queries, others)
        mean = others.mean(dim=0) if precision == "fast" else others[0]
        if candidates is not None and not normalized:  # a query less a mean of far larger candidates overflows float16
            mean = torch.where(mean.abs().amax() <= queries.abs().amax(), mean, 0)
        self.queries = Operands.of(queries, relevance.query_order, mean, operand_scale(queries, normalized), precision)
        self.candidates = (
            self.queries
            if candidates is None
            else Operands.of(others, relevance.candidate_order, mean, operand_scale(others, normalized), precision)
        )
        self.num_candidates = len(relevance.candidate_order)
        self.scaled: dict[float, dict[str, Tensor]] = {}
        self.kept: list[tuple[Tensor, Tensor] | BucketTables | None] = []  # per row block what a lowering keeps of its counts
        self.asm = has_gpu(queries.device)
        self.normalized = normalized
        self.many_mode = partial(_many_mode, layout=layout, normalized=normalized)
        self.grids: QueryGrids | None = None

    def positives(self, block: int) -> PositiveScores:
        rows, width = self.row_blocks[block], self.layout.widths[block]
        count, device = rows.stop - rows.start, self.query_order.device
        columns = torch.empty(width, count, device=device)
        common: dict[str, Any] = {"out": columns, "first_row": rows.start, "num_rows": count, "P": width, **self._shape}
        common |= self._operands(self.threshold_scale)
        if isinstance(self.relevance, PairRelevance):
            listed, valid = self.relevance.positives(rows, width)
            if width:
                tile = self._tile(STORE_TILES, SPLIT_TILES)
                listed_positives_kernel[(triton.cdiv(count, TILE),)](positives=listed.int().contiguous(), **common, **tile)
            columns.masked_fill_(~valid.t(), torch.inf)
            scores = (columns / self.threshold_scale).t().contiguous()
        else:
            scores = torch.empty(count, width, device=device)  # objectives work on rows
            valid = torch.empty(count, width, dtype=torch.bool, device=device)
            if width:
                lists = {name: self.layout.lists[name] for name in ("start", "stop", "self_index", "num_relevant")}
                made = {"plain": scores, "valid": valid.view(torch.uint8), "plain_scale": 1 / self.threshold_scale}
                positives_kernel[(triton.cdiv(count, TILE),)](**lists, **common, **made, **self._narrow_tile())
        gains = self.relevance.gains(rows, width)
        return PositiveScores(
            scores=scores,
            columns=columns,
            valid=valid,
            gains=None if gains is None else gains.float(),
            num_relevant=self.relevance.num_relevant[rows],
            list_length=self.relevance.list_length[rows],
            rank_dtype=torch.float32,
        )

    def _tile(self, tiles: Tiles, split_tiles: Tiles) -> dict[str, int]:
        return tile_for(split_tiles if self.precision == "high" else tiles, self.query_order.device)

    def _narrow_tile(self) -> dict[str, int]:
        """For kernels with an address for every score, and scores the same to the last bit as those of counting."""
        return {**self._tile(STORE_TILES, SPLIT_TILES), "BN": TILE // 2, "num_warps": 8}

    def _operands(self, score_scale: float) -> dict[str, Tensor]:
        """What makes a score, in multiples of 1 / score_scale."""
        if score_scale not in self.scaled:
            q, c = self.queries, self.candidates
            summed = min(self.bases[0].shape[1], FLUSH.value) if self.precision == "high" and self.asm else 0
            alpha = score_scale * (1 + CUT_OFF * summed) / (q.scale * c.scale)
            row_bias = q.bias * score_scale if self.precision == "fast" else q.bias  # which is 0
            self.scaled[score_scale] = {
                "queries": q.operand,
                "candidates": c.operand,
                "row_bias": row_bias,
                "column_bias": row_bias if c is q else c.bias * score_scale,
                "alpha": alpha if isinstance(alpha, Tensor) else torch.full((1,), alpha, device=q.bias.device),
            }
        return self.scaled[score_scale]

    @property
    def _shape(self) -> dict[str, Any]:
        split = self.precision == "high"
        return {"SPLIT": split, "D": self.queries.operand.shape[1] // (1 + split)}

    @property
    def _constants(self) -> dict[str, Any]:
        listed = isinstance(self.relevance, PairRelevance)
        return {"LISTED": listed, "RANK_SELF": self.relevance.rank_self, "ASM": self.asm, **self._shape}

    def count(self, ops: Lowering[Any], thresholds: list[Any], seed: int, *, keep: bool) -> list[Any]:
        widths, device = self.layout.widths, self.query_order.device
        mode = self.many_mode(ops)
        if mode is not None and mode == GRID:
            return self._count_on_grids(ops, thresholds)
        if mode is not None:
            return self._count_by_search(ops, thresholds, keep=keep)
        if ops.per_positive:
            groups = self.row_blocks
            args = [ops.count_args(*block, device) for block in zip(thresholds, widths, strict=True)]
        else:  # all queries have the same thresholds, however many positives they have
            groups, args = [self.everyone], [ops.count_args(thresholds[0], widths[0], device)]
        found = self._count(ops, args, groups)
        if ops.per_positive:
            self.kept = [kept for _, kept in found]
            return [counts for counts, _ in found]
        self.kept = [None for _ in self.row_blocks]
        return [found[0][0][rows] for rows in self.row_blocks]

    def _count(
        self, ops: Lowering[Any], args: Sequence[CountArgs], groups: Sequence[slice]
    ) -> list[tuple[Tensor, tuple[Tensor, Tensor] | None]]:
        """[rows, P] counts of every group, and (slopes, thresholds as they are compared) where `ops` keeps slopes."""
        root = self._root(ops)
        if root:
            args = [CountArgs(torch.exp2(of_group.thresholds / root), of_group.num_thresholds) for of_group in args]
        # A sum over the queries of a tile costs more than one over candidates and is worth it where a score is three products:
        # RS@k of 65,536 items is counted in 20.3 and not 29.3 ms then, else in 14.8 and not 10.3, on an H200.
        both = self.symmetric and self.precision == "high"
        tile = tile_for(COUNT_BOTH_TILES, self.query_order.device) if both else self._tile(COUNT_TILES, SPLIT_TILES)
        sums = self._fused(ops, self._passes(groups), tile).count(args, both=both)
        return [
            (found[0].t().contiguous(), (found[1], of_group.thresholds) if ops.keeps_slopes else None)
            for found, of_group in zip(sums, args, strict=True)
        ]

    def _passes(self, groups: Sequence[slice]) -> Passes:
        return Passes(groups, self.num_candidates, self.queries.parts, self.symmetric)

    def _fused(self, ops: Lowering[Any], passes: Passes, tile: Mapping[str, int]) -> FusedScores:
        made = self._made(ops, tile)
        return FusedScores(ops, passes, self.layout.lists, self._root(ops), *made, tile)

    def _stored(self, ops: Lowering[Any], passes: Passes) -> StoredScores:
        wide = self.precision == "high" and takes_descriptors(self.query_order.device)
        tile = DESCRIBED_TILE if wide else self._tile(STORE_TILES, SPLIT_TILES)
        return StoredScores(ops, passes, self.layout.lists, *self._made(ops, tile), tile)

    def _made(self, ops: Lowering[Any], tile: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What makes scores: operands, by tensor descriptors where a GPU has them, and constants."""
        operands: dict[str, Any] = self._operands(ops.score_scale)
        by_descriptors = takes_descriptors(self.query_order.device)
        if by_descriptors:
            operands = {**operands, **described(operands, tile)}
        return operands, {**self._constants, "DESCRIBED": by_descriptors}

    def _root(self, ops: Lowering[Any]) -> int:
        """Of what powers a sigmoid is made: scores of unit vectors are in [-1, 1], others anywhere."""
        return root_of(1.001 * ops.score_scale) if self.normalized and ops.mode == SIGMOID else 0

    def _scatter(self, ops: Lowering[Any], rows: slice, arguments: dict[str, Any]) -> None:
        tile = self._narrow_tile()
        count, splits = rows.stop - rows.start, triton.cdiv(self.num_candidates, tile["BN"] * TILES_EACH)
        scatter_kernel[(triton.cdiv(count, TILE) * splits,)](
            **self._operands(ops.score_scale),
            **self.layout.lists,
            **arguments,
            first_row=rows.start,
            num_rows=count,
            num_candidates=self.num_candidates,
            tiles_per_split=TILES_EACH,
            splits=splits,
            MODE=ops.many_mode,
            **self._constants,
            **tile,
        )

    def _count_on_grids(self, ops: Lowering[Any], thresholds: list[Any]) -> list[Tensor]:
        self.grids = QueryGrids(
            [of_block.columns for of_block in thresholds],
            self.row_blocks,
            self.layout.lists["num_relevant"],
            cells_of_unit_vectors(ops.score_scale),
            wide=self.precision == "high",
        )
        sums = self.grids.count(self.num_candidates, partial(self._scatter, ops), TILE)
        self.kept = [(slopes, self.grids.begins) for _, slopes in sums]
        return [counts.t() for counts, _ in sums]

    def _count_by_search(self, ops: Lowering[Any], thresholds: list[Any], *, keep: bool) -> list[DescendingCounts]:
        found, self.kept = [], []
        for of_block, rows in zip(thresholds, self.row_blocks, strict=True):
            queries = torch.arange(rows.start, rows.stop, device=self.query_order.device)
            buckets = num_buckets(of_block.values.shape[1])
            tables = BucketTables(of_block, queries, self.layout.lists["num_relevant"], buckets)
            counts = torch.zeros(tables.descending.shape, dtype=torch.int32, device=queries.device)
            named = {"maps": tables.bucket_map, "tables": tables.begin, "descending": tables.descending, "sums": counts}
            if tables.width:
                self._scatter(ops, rows, named | {"size": tables.width, "bits": 0, "count_bits": 0, "scale": 1.0})
            found.append(tables.num_reaching(counts))
            self.kept.append(tables if keep else None)
        return found

    @property
    def everyone(self) -> slice:
        return slice(0, len(self.query_order))

    def backward(self, ops: Lowering[Any], thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        args = [ops.backward_args(*block) for block in zip(thresholds, rank_grads, self.kept, strict=True)]
        peak, steepest = BackwardArgs.joint_peak(args)
        unit = peak.clamp(min=1e-30) * (steepest * (2 if self.symmetric else 1) / GRADIENT_PEAK)
        for of_block in args:
            of_block.rescale(unit)
        self.gradient = EmbeddingGradient(self.bases, self.queries, self.candidates, self.layout, unit)
        if self.grids:
            self._multiply_gradient(ops, [self.grids.backward_args(args)], [self.everyone])
        elif ops.per_positive:
            self._multiply_gradient(ops, args, self.row_blocks)
        else:
            self._multiply_gradient(ops, [BackwardArgs.joined(args)], [self.everyone])
        return [ops.threshold_grad(*block) for block in zip(rank_grads, self.kept, args, strict=True)]

    def _multiply_gradient(self, ops: Lowering[Any], args: Sequence[BackwardArgs], groups: Sequence[slice]) -> None:
        """Passes over the queries: the gradient of scores, then the library's products with that."""
        passes, stored = self._passes(groups), self.many_mode(ops) is not None
        tile = self._tile(BACKWARD_TILES, SPLIT_BACKWARD_TILES)
        scores = self._stored(ops, passes) if stored else self._fused(ops, passes, tile)
        shape = (passes.parts, passes.rows, padded(self.num_candidates, TILE))
        memory = torch.empty(shape, dtype=torch.float16, device=self.query_order.device)
        if not stored and args[0].reached is not None:
            perturbed = self._count(ops, [of_group.perturbed for of_group in args], groups)
            for of_group, (counts, _) in zip(args, perturbed, strict=True):
                of_group.reached = counts.t()
        if not stored and ops.per_positive:
            args = [of_group.pairs() for of_group in args]
        for index, rows in passes:
            height = rows.stop - rows.start
            # the library's products are slow where a length is odd
            stride = padded(self.num_candidates - (rows.start if self.symmetric else 0), TILE)
            gradient = [part.view(-1)[: height * stride].view(height, stride) for part in memory]
            scores.gradient(args, index, rows, gradient)
            self.gradient.add(gradient, rows)

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        return self.gradient.finish(d_positives)
