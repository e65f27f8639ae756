"""Memory for activations: how large a chunk may be, and how many chunks may keep their autograd graph between passes."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rankgrad._checks import check_count
from rankgrad._device import available_bytes
from rankgrad.train.batch_tree import leaves, num_rows, select_rows
from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.snapshot import BufferSnapshot, RngSnapshot

if TYPE_CHECKING:
    from rankgrad.train.large_batch import LargeBatch

# share of the free memory that a step may use: the caching allocator cannot hand out every byte, and a CPU's memory is shared
# with the rest of the machine
SHARE = {"cuda": 0.9, "cpu": 0.5}

# a backward pass holds gradients of some activations besides the activations
BACKWARD_FACTOR = 1.5

PROBE = 8
"""Images of the smallest chunk that is measured, where the batch has as many."""


class ActivationBudget:
    """How many chunks keep their graph: given, or derived from what the first step needed.

    A signature is what the memory of a chunk depends on: the chunk size and the shapes of the images.
    """

    def __init__(self, keep: int | Literal["auto"]) -> None:
        if keep != "auto":
            check_count(keep, name="keep", caller="LargeBatch", least=0)
        self.keep: int | Literal["auto"] = keep
        # by signature: bytes that a step with one kept chunk needed, and bytes of that chunk's graph
        self._measured: dict[Hashable, tuple[int, int]] = {}
        self._decided: dict[Hashable, int] = {}

    def count(self, signature: Hashable, chunks: int, device: torch.device) -> int:
        """Chunks to keep in the next step."""
        if chunks == 1:
            return 1
        if self.keep != "auto":
            return min(self.keep, chunks)
        if signature not in self._measured:
            return 1
        if signature not in self._decided:
            needed, graph = self._measured[signature]
            free = available_bytes(device)
            room = None if free is None else SHARE.get(device.type, 0.5) * free - needed
            self._decided[signature] = 0 if room is None else max(0, 1 + int(room // max(graph, 1)))
        return min(self._decided[signature], chunks)

    def probe(
        self, signature: Hashable, chunks: int, model: nn.Module, inputs: Iterable[Tensor], device: torch.device
    ) -> "MemoryProbe | None":
        """A probe for a step that is to be measured, None where there is nothing to learn."""
        known = self.keep != "auto" or chunks == 1 or signature in self._measured
        return None if known else MemoryProbe(model, inputs, device)

    def record(self, signature: Hashable, probe: "MemoryProbe") -> None:
        self._measured[signature] = (probe.needed(), probe.graph)

    def limit(self, most: int) -> None:
        """Keeps at most this many chunks from now on."""
        if self.keep != "auto":
            self.keep = min(self.keep, most)
        self._decided = {signature: min(count, most) for signature, count in self._decided.items()}

    def keep_none(self) -> bool:
        """Keeps nothing from now on; False where nothing was kept except for measuring."""
        kept = self.keep > 0 if self.keep != "auto" else any(count > 1 for count in self._decided.values())
        if kept:
            self.keep = 0
        return kept

    def reset(self) -> None:
        """Drops all measurements."""
        self._measured, self._decided = {}, {}


class MemoryProbe:
    """Memory of one step: on a GPU its peak (resets torch's peak statistics), on a CPU the tensors saved for backward."""

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor], device: torch.device) -> None:
        self.model, self.inputs, self.device, self.graph = model, inputs, device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Measures the forward pass of the kept chunk inside the context."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            yield
            self.graph = torch.cuda.memory_allocated(self.device) - before
        else:
            with count_saved_bytes(self.model, self.inputs) as counter:
                yield
            self.graph = counter.total

    def needed(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.device.type == "cuda" else self.graph


def choose_chunk(step: "LargeBatch", images: Any) -> int:
    """The largest chunk size that fits in memory, 0 for the whole batch; measures memory, not time."""
    items, device = num_rows(images), step.device
    free = available_bytes(device)
    if free is None or live_batch_norms(step.model) or items <= PROBE:
        return 0
    rng, buffers = RngSnapshot.of(device), BufferSnapshot.of(step.model)
    try:
        small, double = (graph_bytes(step, images, size) for size in (PROBE, min(2 * PROBE, items)))
    finally:
        rng.restore()
        buffers.restore()
    # bytes that each image adds; a fixed part, such as a cast of the weights, is in both and cancels
    each = max(1, (double - small) // (min(2 * PROBE, items) - PROBE))
    fitting = int(SHARE.get(device.type, 0.5) * free / BACKWARD_FACTOR - max(0, small - PROBE * each)) // each
    if fitting >= items:
        return 0
    fitting = max(1, fitting)
    # chunks of equal size: no small last one
    return -(-items // -(-items // fitting))


def graph_bytes(step: "LargeBatch", images: Any, size: int) -> int:
    """Bytes saved for the backward pass of the first `size` images."""
    region = torch.autocast(step.device.type, dtype=step.autocast, enabled=step.autocast is not None)
    with torch.enable_grad(), count_saved_bytes(step.model, leaves(images)) as counter, region:
        step.model(select_rows(images, slice(0, size), step.device))
    return counter.total


class SavedBytes:
    """Bytes of distinct storages that are saved for backward, except those that exist anyway."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self.total = 0
        self._seen = {_storage(tensor).data_ptr() for tensor in existing}

    def add(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor; of a sharded one, this process's."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


@contextmanager
def count_saved_bytes(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Counts what is saved for backward inside the context besides model and inputs, on any device."""
    counter = SavedBytes((*model.parameters(), *model.buffers(), *inputs))
    with torch.autograd.graph.saved_tensors_hooks(counter.add, lambda tensor: tensor):
        yield counter
