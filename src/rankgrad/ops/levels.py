"""Relevance by labels at several levels, from coarse to fine: the deeper the level that two items share, the larger the gain.

    Levels        as a caller gives them
    LevelLists    checked, of the queries and candidates of a batch

Candidates of the query's coarsest class are relevant, so the engine sees classes, whose positives have gains.

Dimension letters:  Q queries   C candidates   L levels   P positives, padded
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import GAINS, as_tensor, shape_of
from rankgrad.ops.labels import IntervalRelevance, Labels
from rankgrad.ops.relevance import TileRelevance, level_gains


@dataclass(frozen=True, eq=False, init=False)
class Levels:
    """Labels at L levels, coarse to fine: super-category, class, instance.

        loss = rg.RankLoss(rg.Sigmoid(0.01), rg.HierarchicalAveragePrecision())
        loss(embeddings, relevance=rg.Levels(labels))                                  [Q, L], a batch against itself
        loss(embeddings, relevance=rg.Levels(labels, ref_labels), ref_emb=refs)        queries against references

    Two items share a level if their labels agree there and at all coarser ones. A candidate that shares the coarsest level with
    the query is relevant; its gain is that of the deepest level they share.

    Args:
        labels: [Q, L] integers; a tensor, an array or nested lists, like `ref_labels`.
        ref_labels: [C, L] integers of the references.
        gains: one for each level, above 0 and not falling; by default 1/L, 2/L, ..., 1.
    """

    labels: Tensor
    ref_labels: Tensor | None = None
    gains: tuple[float, ...] | None = None

    def __init__(
        self, labels: Tensor | ArrayLike, ref_labels: Tensor | ArrayLike | None = None, gains: Tensor | ArrayLike | None = None
    ) -> None:
        checked: dict[str, Tensor] = {}
        for name, given in (("labels", labels), ("ref_labels", ref_labels)):
            if name == "ref_labels" and given is None:
                continue
            each = as_tensor(given, name=name, caller="Levels")  # type: ignore[arg-type]
            if each.ndim != 2 or not each.shape[1] or each.is_floating_point() or each.is_complex() or each.dtype == torch.bool:
                came = f"{each.dtype} of shape {shape_of(each)}"
                raise ValueError(f"Levels: {name} must be integers of shape (items, levels), got {came}")
            checked[name] = each
        levels, *of_refs = (each.shape[1] for each in checked.values())
        if of_refs and of_refs[0] != levels:
            raise ValueError(f"Levels: ref_labels must have the {levels} levels of labels, got {of_refs[0]}")
        object.__setattr__(self, "labels", checked["labels"])
        object.__setattr__(self, "ref_labels", checked.get("ref_labels"))
        object.__setattr__(self, "gains", None if gains is None else _checked_gains(gains, levels))

    def to(self, device: torch.device | str) -> "Levels":
        """The same levels on a device; a loss moves them by itself."""
        return Levels(self.labels.to(device), None if self.ref_labels is None else self.ref_labels.to(device), self.gains)

    @property
    def table(self) -> Tensor:
        """[L + 1] the gain of items that share so many levels."""
        levels = self.labels.shape[1]
        gains = [(level + 1) / levels for level in range(levels)] if self.gains is None else list(self.gains)
        return torch.tensor([0.0, *gains], dtype=torch.float64)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> "Levels":
        """The labels of the batch that several processes hold together."""
        return Levels(gather(self.labels.long()), self.ref_labels, self.gains)

    def item_rows(self, items: int) -> Tensor:
        """The labels."""
        return self.labels

    def with_references(self, rows: Tensor) -> "Levels":
        """Of the same queries against references with these labels."""
        return Levels(self.labels, rows, self.gains)

    def of_batch(
        self, queries: int, candidates: int | None, self_index: Tensor | None = None, *, rank_self: bool = False, caller: str
    ) -> "LevelLists":
        """Relevance of a batch of `queries` ranked against itself (`candidates` None) or against so many references."""
        for name, labels, items in (("labels", self.labels, queries), ("ref_labels", self.ref_labels, candidates)):
            if labels is not None and items is None:
                raise ValueError(f"{caller}: relevance: ref_labels of Levels go with ref_emb, and there is none")
            if items is not None and (labels is None or len(labels) != items):
                of, came = "embeddings" if name == "labels" else "ref_emb", "none" if labels is None else len(labels)
                wanted = f"one row for each of the {items} {of}"
                raise ValueError(f"{caller}: relevance: {name} of Levels must be {wanted}, got {came}")
        return LevelLists(self.labels, self.ref_labels, self_index, self.table, rank_self)


def _checked_gains(gains: Tensor | ArrayLike, levels: int) -> tuple[float, ...]:
    each = as_tensor(gains, name="gains", caller="Levels")
    if each.shape != (levels,):
        came = f"shape {shape_of(each)}" if each.ndim != 1 else len(each)
        raise ValueError(f"Levels: gains must be one for each of {levels} levels, got {came}")
    found = tuple(float(gain) for gain in each.tolist())
    for gain in found:
        if not GAINS[0] <= gain <= GAINS[1]:
            hint = "; leave a level without gain out of labels" if gain == 0 else ""
            raise ValueError(f"Levels: every gain must be between {GAINS[0]:g} and {GAINS[1]:g}, got {gain!r}{hint}")
    if found != tuple(sorted(found)):
        raise ValueError(f"Levels: gains must not fall from coarse to fine, got {list(found)}")
    return found


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

    def build(self, *, captured: bool = False) -> IntervalRelevance:
        built = self.classes.build(captured=captured)
        rows, columns = self.labels[built.query_order], self._refs[built.candidate_order]
        return replace(built, query_levels=rows, candidate_levels=columns, table=self.table.to(rows.device))
