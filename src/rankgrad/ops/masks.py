"""Relevance of given scores as a matrix, bool or graded.

Dimension letters:  Q queries   C candidates   B queries of a row block
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """A matrix of relevance, one list per row: bool, or graded with numbers of at least 0, relevant where above 0."""

    relevance: Tensor  # [Q, C], or [C] of one list
    candidates: Tensor | None = None  # likewise, False for scores that are not ranked

    def view(self, shape: tuple[int, int]) -> "Mask":
        """The same for a vector as one row."""
        return Mask(self.relevance.view(shape), None if self.candidates is None else self.candidates.view(shape))

    def build(self) -> "MaskRelevance":
        return MaskRelevance.build(self.relevance, self.candidates)


@dataclass(frozen=True)
class MaskRelevance:
    """The lists of a relevance matrix, one per row. Rows with about as many relevant items come together."""

    is_relevant: Tensor  # [Q, C]
    grades: Tensor | None  # [Q, C] graded relevance
    candidates: Tensor | None  # [Q, C] False for what is not ranked, None where all is
    query_order: Tensor  # [Q]
    num_relevant: Tensor  # [Q] in the caller's order, like all below
    list_length: Tensor  # [Q]
    column: Tensor  # [pairs] columns of the relevant items, row after row, ascending
    first: Tensor  # [Q] where a row begins in `column`
    width: int | None = None  # most relevant items of a row, if those of `column` are padded to it, in the caller's order

    @classmethod
    def build(cls, relevance: Tensor, candidates: Tensor | None) -> "MaskRelevance":
        grades = None if relevance.dtype == torch.bool else relevance
        is_relevant = relevance if grades is None else relevance > 0
        queries, length = relevance.shape
        if candidates is None:
            list_length = torch.full((queries,), length, device=relevance.device)
        else:
            is_relevant, list_length = is_relevant & candidates, _true_per_row(candidates)
        flat = is_relevant.reshape(-1).nonzero().view(-1)
        if queries == 1:  # a long list is worth a shortcut: no copies, and no further synchronisation
            num_relevant = torch.full_like(list_length, len(flat))
            return cls(
                is_relevant,
                grades,
                candidates,
                torch.zeros_like(list_length),
                num_relevant,
                list_length,
                flat,
                num_relevant,
            )
        edges = torch.searchsorted(flat, torch.arange(0, (queries + 1) * length, length, device=flat.device))
        num_relevant = edges.diff()
        order = num_relevant.argsort(stable=True)
        return cls(is_relevant, grades, candidates, order, num_relevant, list_length, flat % length, edges[:-1])

    @property
    def single(self) -> bool:
        """One list without padding."""
        return len(self.query_order) == 1 and self.width is None

    def rows(self, block: slice) -> Tensor | slice:
        """The rows of a block of the query order, to index a matrix with: a view, where the order is the caller's."""
        return block if self.single or self.width is not None else self.query_order[block]

    def widths(self, blocks: list[slice]) -> list[int]:
        """Most relevant items of a row in each block."""
        if self.single or self.width is not None:
            return [len(self.column) if self.width is None else self.width for _ in blocks]
        # the query order has the most at the end; one transfer to the host for all blocks
        most: list[int] = self.num_relevant[self.query_order[[c.stop - 1 for c in blocks]]].tolist()
        return most

    def hidden(self, rows: Tensor | slice, columns: slice) -> Tensor:
        """[B, Z] True for what is relevant or not ranked."""
        hidden = self.is_relevant[rows, columns]
        return hidden if self.candidates is None else hidden | ~self.candidates[rows, columns]

    def positives(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor | None]:
        """[B, width] columns of the positives of `rows`, and False at the padding, None where there is none."""
        if self.single:
            return self.column[None], None
        step = torch.arange(width, device=self.column.device)
        valid = step < self.num_relevant[rows, None]
        if self.width is not None:
            return self.column.view(-1, self.width)[rows], valid
        return self.column[torch.where(valid, self.first[rows, None] + step, 0)], valid

    def gather(self, matrix: Tensor, rows: Tensor | slice, columns: Tensor) -> Tensor:
        """[B, width] entries of a matrix of the same shape at `columns` of `rows`."""
        if isinstance(rows, slice):
            return matrix[0].index_select(0, columns[0])[None] if self.single else matrix[rows].gather(1, columns)
        return matrix[rows[:, None], columns]


def _true_per_row(mask: Tensor) -> Tensor:
    # a bool sum along rows is slow on a CPU, and counting a whole tensor is not
    return torch.stack([row.count_nonzero() for row in mask]) if len(mask) <= 8 else mask.sum(dim=1)
