"""Memory that the tiles of a pass take turns in: on a CPU fresh memory costs more than what is done with it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class TileMemory:
    """Blocks of memory by name. A tensor lives until the next one of its name is asked for."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}
        self._views: dict[tuple[object, ...], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous, whatever is in it."""
        key = (name, *shape, dtype)
        if key not in self._views:
            numel = 1
            for size in shape:
                numel *= size
            block = self._blocks.get(name)
            if block is None or block.dtype != dtype or len(block) < numel:
                self.forget(name)
                block = self._blocks[name] = torch.empty(numel, dtype=dtype, device=device)
            self._views[key] = block[:numel].view(*shape)
        return self._views[key]

    def like(self, tile: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Of the tile's shape, a transposed tile's transposed too."""
        dtype = tile.dtype if dtype is None else dtype
        if tile.is_contiguous() or not tile.t().is_contiguous():
            return self.empty(name, tile.shape, dtype, tile.device)
        key = (name, "transposed", *tile.shape, dtype)
        if key not in self._views:
            self._views[key] = self.empty(name, tile.shape[::-1], dtype, tile.device).t()
        return self._views[key]

    def forget(self, name: str) -> None:
        """Leave a block to whoever holds it; the next of its name is another one."""
        self._blocks.pop(name, None)
        self._views = {key: view for key, view in self._views.items() if key[0] != name}

    def sum_rows(self, tile: Tensor, out: Tensor) -> None:
        """Sums of the rows of a tile.

        On a CPU those of a transposed tile are a product: threads would share them by columns, and have written it by rows.
        """
        if tile.is_contiguous() or tile.device.type != "cpu":
            torch.sum(tile, dim=1, out=out)
            return
        key = ("ones", tile.shape[1], tile.dtype)
        if key not in self._views:
            self._views[key] = tile.new_ones(tile.shape[1])
        torch.mv(tile, self._views[key], out=out)
