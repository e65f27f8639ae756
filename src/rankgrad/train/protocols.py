"""What the loop is handed, as it knows it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Evaluator: TypeAlias = Callable[[nn.Module], Mapping[str, float]]


class Batches(Protocol):
    """The batches of an epoch, from any position: (step in the epoch, indices, images, labels)."""

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int: ...

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]: ...


@runtime_checkable
class Gathering(Protocol):
    """A loss of what several processes hold together, around the loss of one, such as `DistributedRankLoss`."""

    loss: Any
    gathered: tuple[Tensor, Tensor] | None
    """Embeddings and labels of all processes in the last call."""


def undivided(loss: Loss) -> Loss:
    """The loss of one process, whose state is kept whatever the number of processes."""
    inner: Loss = loss.loss if isinstance(loss, Gathering) else loss
    return inner
