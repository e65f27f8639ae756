"""What the loop is handed, as it knows it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Evaluator: TypeAlias = Callable[[nn.Module], Mapping[str, float]]


class Batches(Protocol):
    """The batches of an epoch, from any position: (step in the epoch, indices, images, labels)."""

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int: ...

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]: ...
