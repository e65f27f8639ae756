"""What stands for `step` in a rank, and how it gets a gradient: tile mathematics in plain torch.

A ranker sees one tile at a time: scores of a few queries with some of their irrelevant candidates, against thresholds (the
scores of the query's positives, or bin edges). It says two things about a tile,

    count_tile      how much of it lies ahead of each threshold      C[b, e] = sum over z of kappa(s_bz - t_be)
    tile_backward   the gradient of all those counts                 G[b, z] = dL/ds_bz, and the tile's part of dL/dt_be

and may do once per tile what all comparisons with it share (`tile_map`). The rest is about a query: what its counts mean
(`ranks`), how dL/dranks becomes the weights of `tile_backward` (`rank_gradient`), and the gradient of its positives
(`positive_backward`). What a ranker keeps between the passes has the size of the relevant pairs. Hidden entries of a tile
(positives, the query itself) hold -inf; they count nothing and receive no gradient.

Dimension letters:  B queries   Z candidates of one tile   P positives, padded   E thresholds
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rankgrad.ops.autograd import GRAD_FIELDS, Objective, PositiveScores, Ranks, Upstream, own_derivative
from rankgrad.ops.graded_ranks import exact_graded_rank
from rankgrad.ops.tile_memory import TileMemory

TileMap = Callable[[Tensor], Tensor]


class Ranker(ABC):
    """One choice of `step`. Stateless: what belongs to a batch is handed from method to method.

    A ranker without a gradient sets `differentiable` to False and leaves out the three gradient methods.
    """

    differentiable = True
    grad_fields: tuple[str, ...] = GRAD_FIELDS  # fields of `Ranks` that `rank_gradient` needs the objective's derivative by

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, which the kernels do not."""
        return False

    def weighted(self, weight: float) -> "Ranker":
        """The ranker of a loss that enters a sum with `weight`, where that matters for the gradient."""
        return self

    @abstractmethod
    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        """What tiles are compared with. `key` is the same in forward and backward of a row block."""

    def tile_map(self, thresholds: list[Any]) -> tuple[TileMap | None, list[Any]]:
        """What comparisons with a tile have in common, as a change of its scores in place; None: they stay as they are.

        And the thresholds as a tile so changed is compared with them. `thresholds` are those of all row blocks or, where that
        gives no map, of the row blocks that a tile and its transpose belong to.
        """
        return None, thresholds

    def kept_tile(self, tile: Tensor, memory: TileMemory) -> Tensor:
        """What `tile_backward` needs of a tile as `tile_map` leaves it: kept from the forward pass where memory allows.

        Where that is not the tile itself, it is asked for before `count_roles`, which may then change the tile.
        """
        return tile

    @abstractmethod
    def count_tile(self, tile: Tensor, thresholds: Any, key: int, memory: TileMemory) -> Tensor:
        """[B, E] irrelevant candidates of the tile, as `tile_map` leaves it, ahead of each threshold."""

    def count_roles(self, tile: Tensor, thresholds: list[Any], keys: list[int], memory: TileMemory) -> list[Tensor]:
        """`count_tile` with the rows as queries and, where a second one has thresholds, with the columns as queries."""
        roles = zip((tile, tile.t()), thresholds, keys, strict=False)
        return [self.count_tile(*role, memory) for role in roles]

    @abstractmethod
    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Any) -> Ranks:
        """What the counts of all tiles mean."""

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        """[B, P] `Ranks.graded_rank` as a function of the scores of the positives; without a gradient unless it has one."""
        return exact_graded_rank(positives, positive_rank)

    def with_gradient(self, objective: Objective, ranks: Ranks) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """See `RankOps`."""
        derivative = own_derivative(objective)
        found = None if derivative is None else derivative(ranks, self.grad_fields, None)
        return None if found is None else (found[0], tuple(found[1:]))

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        """From d(loss of a query) / d(grad_fields) to what `tile_backward` needs."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def tile_backward(
        self, tile: Tensor, thresholds: Any, rank_grad: Any, key: int, gradient: Tensor, memory: TileMemory, *, add: bool
    ) -> Tensor | None:
        """Write to `gradient` [B, Z], or add to it, that of the tile's scores before `tile_map`.

        The tile is what `kept_tile` returned. Returns the tile's part of the thresholds' gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: Any,
        positives: PositiveScores,
        thresholds: Any,
        upstream: Upstream,
    ) -> Tensor:
        """[B, P] gradient of the positives' scores, from what the tiles summed up and the positives themselves."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")
