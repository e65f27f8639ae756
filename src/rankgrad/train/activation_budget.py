"""How many chunks of a large batch may keep their graph: what the first step needed tells what the next ones can afford."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from rankgrad._checks import check_count
from rankgrad.train.memory import available_bytes, counting_saved_bytes

# of the memory that is free, what a step may take: the caching allocator cannot hand out every last byte, and on the CPU
# the rest of the machine wants to live too
SHARE = {"cuda": 0.9, "cpu": 0.5}


class Keeping:
    """The number of chunks to keep, given or measured; a kind of batch is its chunk size and shapes."""

    def __init__(self, keep: int | Literal["auto"]) -> None:
        if keep != "auto":
            check_count(keep, name="keep", caller="LargeBatch", least=0)
        self.keep: int | Literal["auto"] = keep
        # by kind: bytes that a step with one chunk kept needed, and bytes of that chunk's graph
        self._seen: dict[Hashable, tuple[int, int]] = {}
        self._decided: dict[Hashable, int] = {}

    def count(self, kind: Hashable, chunks: int, device: torch.device) -> int:
        """Chunks to keep in the next step."""
        if chunks == 1:
            return 1
        if self.keep != "auto":
            return min(self.keep, chunks)
        if kind not in self._seen:
            return 1
        if kind not in self._decided:
            needed, graph = self._seen[kind]
            free = available_bytes(device)
            room = None if free is None else SHARE.get(device.type, 0.5) * free - needed
            self._decided[kind] = 0 if room is None else max(0, 1 + int(room // max(graph, 1)))
        return min(self._decided[kind], chunks)

    def step(
        self, kind: Hashable, chunks: int, model: nn.Module, inputs: Iterable[Tensor], device: torch.device
    ) -> "FirstStep | None":
        """A step to be measured, or None where there is nothing to learn."""
        return None if self.keep != "auto" or chunks == 1 or kind in self._seen else FirstStep(model, inputs, device)

    def learn(self, kind: Hashable, first: "FirstStep") -> None:
        self._seen[kind] = (first.needed(), first.graph)

    def give_up(self) -> bool:
        """Keeps nothing from now on; False where nothing was kept but for measuring."""
        kept = self.keep > 0 if self.keep != "auto" else any(count > 1 for count in self._decided.values())
        if kept:
            self.keep = 0
        return kept

    def forget(self) -> None:
        """What was measured no longer holds."""
        self._seen, self._decided = {}, {}


class FirstStep:
    """Memory of one step. On a GPU its peak, for which torch's peak statistics are reset; on a CPU the graph's tensors."""

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor], device: torch.device) -> None:
        self.model, self.inputs, self.device, self.graph = model, inputs, device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around the forward pass of the chunk that is kept."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            yield
            self.graph = torch.cuda.memory_allocated(self.device) - before
        else:
            with counting_saved_bytes(self.model, self.inputs) as counter:
                yield
            self.graph = counter.total

    def needed(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.device.type == "cuda" else self.graph
