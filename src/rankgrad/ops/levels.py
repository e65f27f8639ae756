"""Relevance by labels at several levels, from coarse to fine: the deeper the level that two items share, the larger the gain.

    Levels        as a caller gives them
    LevelLists    checked, of the queries and candidates of a batch

Candidates of the query's coarsest class are relevant, so the engine sees classes, whose positives have gains.

Dimension letters:  Q queries   C candidates   L levels   P positives, padded
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankgrad._checks import check_positive, check_tensor, shape_of
from rankgrad.ops.relevance import IntervalRelevance, Labels, TileRelevance, level_gains


@dataclass(frozen=True)
class Levels:
    """Labels at L levels, coarse to fine: super-category, class, instance.

        loss = rg.RankLoss(rg.Sigmoid(0.01), rg.HierarchicalAveragePrecision())
        loss(embeddings, relevance=rg.Levels(labels))                                  [Q, L], a batch against itself
        loss(embeddings, relevance=rg.Levels(labels, ref_labels), ref_emb=refs)        queries against references

    Two items share a level if their labels agree there and at all coarser ones. A candidate that shares the coarsest level with
    the query is relevant; its gain is that of the deepest level they share.

    Args:
        labels: [Q, L] integers.
        ref_labels: [C, L] integers of the references.
        gains: one for each level, above 0 and not falling; by default 1/L, 2/L, ..., 1.
    """

    labels: Tensor
    ref_labels: Tensor | None = None
    gains: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name, labels in (("labels", self.labels), ("ref_labels", self.ref_labels)):
            if name == "ref_labels" and labels is None:
                continue
            check_tensor(labels, name=name, caller="Levels")
            assert labels is not None
            if labels.ndim != 2 or not labels.shape[1] or labels.is_floating_point() or labels.dtype == torch.bool:
                came = f"{labels.dtype} of shape {shape_of(labels)}"
                raise ValueError(f"Levels: {name} must be integers of shape (items, levels), got {came}")
            if labels.shape[1] != self.labels.shape[1]:
                wanted, got = self.labels.shape[1], labels.shape[1]
                raise ValueError(f"Levels: ref_labels must have the {wanted} levels of labels, got {got}")
        if self.gains is not None:
            levels = self.labels.shape[1]
            if len(self.gains) != levels:
                raise ValueError(f"Levels: gains must be one for each of {levels} levels, got {len(self.gains)}")
            for gain in self.gains:
                check_positive(gain, name="every gain", caller="Levels")
            if list(self.gains) != sorted(self.gains):
                raise ValueError(f"Levels: gains must not fall from coarse to fine, got {list(self.gains)}")

    @property
    def table(self) -> Tensor:
        """[L + 1] the gain of items that share so many levels."""
        levels = self.labels.shape[1]
        gains = [(level + 1) / levels for level in range(levels)] if self.gains is None else list(self.gains)
        return torch.tensor([0.0, *gains], dtype=torch.float64)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> "Levels":
        """The labels of the batch that several processes hold together."""
        return replace(self, labels=gather(self.labels.long()))

    def item_rows(self, items: int) -> Tensor:
        """The labels."""
        return self.labels

    def with_references(self, rows: Tensor) -> "Levels":
        """Of the same queries against references with these labels."""
        return replace(self, ref_labels=rows)

    def of_batch(
        self, queries: int, candidates: int | None, self_index: Tensor | None = None, *, rank_self: bool = False, caller: str
    ) -> "LevelLists":
        """Relevance of a batch of `queries` ranked against itself (`candidates` None) or against so many references."""
        for name, labels, items in (("labels", self.labels, queries), ("ref_labels", self.ref_labels, candidates)):
            came = None if labels is None else len(labels)
            if came != items:
                raise ValueError(
                    f"{caller}: relevance: {name} of Levels must be one row for each of the {items or 'no'} embeddings they "
                    f"belong to, got {'none' if came is None else came}"
                )
        return LevelLists(self.labels, self.ref_labels, self_index, self.table, rank_self)


@dataclass(frozen=True)
class LevelLists:
    """Labels of a batch at several levels."""

    labels: Tensor  # [Q, L]
    ref_labels: Tensor | None  # [C, L]
    self_index: Tensor | None  # [Q]
    table: Tensor  # [L + 1] the gain of items that share so many levels
    rank_self: bool

    capturable = True

    @property
    def classes(self) -> Labels:
        """Relevance by the coarsest level."""
        refs = None if self.ref_labels is None else self.ref_labels[:, 0].contiguous()
        return Labels(self.labels[:, 0].contiguous(), refs, self.self_index, self.rank_self)

    @property
    def num_queries(self) -> int:
        return len(self.labels)

    @property
    def num_candidates(self) -> int:
        return len(self._refs)

    @property
    def _refs(self) -> Tensor:
        return self.labels if self.ref_labels is None else self.ref_labels

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.labels, self.ref_labels, self.self_index, self.table) if t is not None)

    @property
    def settings(self) -> Hashable:
        return self.rank_self

    def with_tensors(self, *tensors: Tensor) -> "LevelLists":
        given = iter(tensors)
        labels, ref_labels, self_index, table = (
            None if t is None else next(given) for t in (self.labels, self.ref_labels, self.self_index, self.table)
        )
        assert labels is not None
        assert table is not None
        return LevelLists(labels, ref_labels, self_index, table, self.rank_self)

    def to(self, device: torch.device) -> "LevelLists":
        moved = (t.to(device, non_blocking=True) for t in self.tensors)
        return self.with_tensors(*(t if t.is_floating_point() else t.long() for t in moved))

    def shard(self, rows: slice) -> "LevelLists":
        part = self.classes.shard(rows)
        return LevelLists(self.labels[rows], self._refs, part.self_index, self.table, self.rank_self)

    def transposed(self) -> "LevelLists":
        return LevelLists(self._refs, self.labels, None, self.table, self.rank_self)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        relevant, candidates = self.classes.dense()
        return relevant * level_gains(self.labels, self._refs[None], self.table), candidates

    def one_tile(self) -> TileRelevance:
        tile = self.classes.one_tile()
        return replace(tile, gains=level_gains(self.labels, self._refs[tile.columns], self.table))

    def build(self) -> IntervalRelevance:
        built = self.classes.build()
        rows, columns = self.labels[built.query_order], self._refs[built.candidate_order]
        return replace(built, query_levels=rows, candidate_levels=columns, table=self.table.to(rows.device))
