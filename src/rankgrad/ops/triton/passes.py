"""In what order the scores of queries and candidates are visited: passes over rows, blocks of columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rankgrad.ops.triton.operands import padded
from rankgrad.ops.triton.tiles import TILE, WIDEST

# Most rows of the score gradient that exist at once, of all its parts, and most bytes of them: fewer rows leave an H200 idle in
# a product with 512 columns; 4 GiB are their share of memory at a million candidates.
GRADIENT_ROWS = 4096
GRADIENT_BYTES = 2**32

# Fewest rows of a pass over the scores; fewest columns of scores that are stored at once, where one in SCORE_SHARE is fewer.
PASS_ROWS = 1024
SCORE_COLUMNS = 4096
SCORE_SHARE = 8


@dataclass(frozen=True)
class Passes:
    """Groups of queries against candidates, or against themselves (`symmetric`): then only what a pass has not met yet."""

    groups: Sequence[slice]
    num_candidates: int
    parts: int  # of the score gradient
    symmetric: bool

    @cached_property
    def rows(self) -> int:
        """Rows of the scores and of their gradient that exist at once."""
        candidates = padded(self.num_candidates, TILE)
        rows_that_fit = max(GRADIENT_BYTES // (2 * candidates * self.parts) // TILE * TILE, TILE)
        # the square of a pass with itself is not halved: it is a small part of all scores if there are many passes
        few = max(PASS_ROWS, padded(candidates // 8, TILE))
        largest_group = max(group.stop - group.start for group in self.groups)
        return min(max(GRADIENT_ROWS // self.parts, TILE), rows_that_fit, few, padded(largest_group, TILE))

    @cached_property
    def columns(self) -> int:
        """Columns of stored scores that exist at once: a quarter of the gradient's memory, in few launches."""
        candidates = padded(self.num_candidates, TILE)
        return padded(min(max(SCORE_COLUMNS, candidates * self.parts // SCORE_SHARE), candidates), WIDEST)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Rows that are visited at once, and the group they are of."""
        for index, group in enumerate(self.groups):
            for begin in range(group.start, group.stop, self.rows):
                yield index, slice(begin, min(begin + self.rows, group.stop))

    def blocks(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """Columns that the rows of a pass meet at once, and the group they are of.

        Columns of one set of embeddings are queries too, group by group, and those before the pass have met it. Other
        candidates are one group.
        """
        for index, columns in enumerate(self.groups if self.symmetric else [slice(0, self.num_candidates)]):
            first = max(columns.start, rows.start) if self.symmetric else 0
            for begin in range(first, columns.stop, self.columns):
                yield index, slice(begin, min(begin + self.columns, columns.stop))
