"""Losses as CUDA graphs: up to some 20,000 rows a loss is hundreds of short launches and the host is the bottleneck.

The memory of a captured call stays with the loss. So larger batches are captured where that is a small share of a GPU's memory,
and all captures of a loss have a limit.

A capture holds static copies of the inputs and three graphs: raw inputs -> built relevance, embeddings or scores -> loss,
incoming gradient -> gradient. The gradient of a scalar loss is only scaled by what arrives, so it is computed ahead of the
backward pass, in the same graph as the loss: the host starts both at once. It is in float32, since in float16 what a loss scale
is there to save would be lost before the scale arrives. A capture is leased to one call until its backward pass, or until its
autograd graph is freed, so several calls may be pending at once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rankgrad._device import forget_failed_capture, memory_of, no_garbage_collection
from rankgrad.ops import relevance
from rankgrad.ops.autograd import first_derivative_only, graph_is_kept
from rankgrad.ops.loss_config import is_wide
from rankgrad.ops.relevance import rounded_width

# Rows of a batch up to which calls are captured on every GPU. On an H200 a call of 4,096 rows took 9 ms without and 1 ms with
# graphs, one of 16,384 8.6 and 2.5; of one of 65,536 the GPU works 27 ms, and without graphs it waits 3 ms for the host.
MOST_ROWS = 20_000

# Shares of a GPU's memory that a larger call may keep, and all captured calls of a loss together, the first one apart. Beyond
# that captures make room that this many calls had no use for.
EMBEDDING_BYTES = 8192  # of the gradient of some thousand rows of scores, for each column
ONE_CALL = 1 / 50
ALL_CALLS = 1 / 20
STALE = 1000

Inputs = tuple[Tensor, ...]
Widths = Sequence[int]


@dataclass(frozen=True)
class GraphProgram:
    """A loss in two steps that do not synchronise with the device.

    num_queries: of each of K relevance structures.
    build: from raw inputs (labels, a mask) to anything, and to [K] the most positives of a query in each structure.
    loss: from the tensor that gets a gradient, what `build` returned, and K widths of at least these numbers, to the loss
        and further outputs.
    row_bytes: about what stays with a capture for each row of that tensor, whatever its width.
    """

    num_queries: Sequence[int]
    build: Callable[..., tuple[Any, Tensor]]
    loss: Callable[[Tensor, Any, Widths], tuple[Tensor, ...]]
    row_bytes: int = 0

    def run(self, leaf: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """Both steps, reading the widths in between. Compiles every kernel that a capture needs."""
        built, most = self.build(*inputs)
        return self.loss(_widened(leaf), built, _rounded(most))


def is_capturable(embeddings: Tensor) -> bool:
    """Whether the batch is small enough, in rows or for its GPU."""
    if len(embeddings) <= MOST_ROWS:
        return True
    return held_bytes(embeddings, row_bytes=EMBEDDING_BYTES) <= ONE_CALL * memory_of(embeddings.device)


def held_bytes(leaf: Tensor, inputs: Inputs = (), *, row_bytes: int) -> int:
    """About what stays with a captured call: 12 to 74 kB for an embedding of 128 to 2,048 dimensions."""
    numbers = leaf.numel() * max(leaf.element_size(), torch.float32.itemsize)
    return 8 * (numbers + sum(tensor.nbytes for tensor in inputs)) + row_bytes * len(leaf)


def _widened(leaf: Tensor) -> Tensor:
    """In the dtype in which a capture reads it and makes its gradient."""
    return leaf if is_wide(leaf) else leaf.float()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Of each GPU its own: that of torch is on the GPU of the first capture, whichever is current."""
    return torch.cuda.Stream(device)


def _rounded(most: Tensor) -> list[int]:
    return [rounded_width(number) for number in most.tolist()]


def side_by_side(device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Results of two independent calls, as two branches of a graph during a capture."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return first(), second()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        beside = second()
    result = first()
    main.wait_stream(side)
    return result, beside


class Capture:
    """One loss at one shape."""

    def __init__(self, leaf: Tensor, inputs: Inputs, widths: Widths, program: GraphProgram) -> None:
        self.widths = widths
        self.last_call = 0
        self.stream = torch.cuda.current_stream()  # of the last call
        self.beside = torch.cuda.Stream()
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.leaf = leaf.detach().clone().requires_grad_()
        self.most = torch.zeros(len(widths), dtype=torch.long, pin_memory=True)  # positives of a query in the last call
        self.known = torch.cuda.Event()  # they have arrived
        pool = torch.cuda.graph_pool_handle()
        self.build_graph, self.loss_graph, self.grad_graph = (torch.cuda.CUDAGraph() for _ in range(3))
        capture = partial(torch.cuda.graph, pool=pool, stream=_capture_stream(leaf.device), capture_error_mode="thread_local")
        with capture(self.build_graph):
            built, most = program.build(*self.inputs)
            self.most.copy_(most, non_blocking=True)
        with capture(self.loss_graph), torch.enable_grad():
            out, *self.others = program.loss(self.leaf, built, widths)
            if not out.ndim:
                (self.d_leaf,) = torch.autograd.grad(out, self.leaf, retain_graph=True)
        self.out = out.detach()
        if out.ndim:
            self.grad_out = torch.ones_like(self.out)
            with capture(self.grad_graph):
                (self.d_leaf,) = torch.autograd.grad(out, self.leaf, self.grad_out, retain_graph=True)
        self.held = built, out  # the graphs read and write their memory
        self._begun: list[tuple[Tensor, Hashable]] = []

    def begin(self, inputs: Inputs) -> None:
        """Build the relevance of the next call ahead of it, on a stream beside what is launched until then."""
        self.beside.wait_stream(torch.cuda.current_stream())  # which has made the inputs
        with torch.cuda.stream(self.beside):
            self._follow_last_call()
            self._build(inputs)
        # held, so that no other tensor gets their memory meanwhile
        self._begun = [(tensor, _place(tensor)) for tensor in inputs]

    def has_begun(self, inputs: Inputs) -> bool:
        """Whether `begin` was called with these very values."""
        return bool(self._begun) and [place for _, place in self._begun] == [_place(tensor) for tensor in inputs]

    def takes(self, inputs: Inputs) -> bool:
        """Whether inputs have the shapes and types of the captured ones."""
        return [(t.shape, t.dtype, t.device) for t in self.inputs] == [(t.shape, t.dtype, t.device) for t in inputs]

    def replay(self, leaf: Tensor, inputs: Inputs) -> list[int]:
        """Run a call and return its most positives of a query while the GPU is still working."""
        self._follow_last_call()
        if self.has_begun(inputs):
            self.known.wait()  # it may have begun on another stream
        else:
            self._build(inputs)
        self._begun = []
        self.leaf.detach().copy_(leaf)
        self.loss_graph.replay()
        self.known.synchronize()
        most: list[int] = self.most.tolist()
        return most

    def _follow_last_call(self) -> None:
        """Wait for the last call if it ran on another stream, where it may still read what this one writes."""
        stream = torch.cuda.current_stream()
        if stream != self.stream:
            stream.wait_stream(self.stream)
            self.stream = stream

    def _build(self, inputs: Inputs) -> None:
        _copy(self.inputs, inputs)
        self.build_graph.replay()
        self.known.record()

    def gradient(self, grad_out: Tensor) -> Tensor:
        """Gradient of the leaf, in memory of its own."""
        if not self.out.ndim:
            return self.d_leaf * grad_out
        self.grad_out.copy_(grad_out)
        self.grad_graph.replay()
        return self.d_leaf.clone()


def _place(tensor: Tensor) -> Hashable:
    """Where a tensor is, and a count of what was written to it; tensors of inference mode have none."""
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no public name for it
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version


def _copy(static: Inputs, inputs: Inputs) -> None:
    """All tensors of one dtype in one launch."""
    if len(static) == 1:  # of which a plain copy is the fastest
        static[0].copy_(inputs[0], non_blocking=True)
        return
    for dtype in {tensor.dtype for tensor in static}:
        torch._foreach_copy_(
            [t for t in static if t.dtype == dtype], [t for t in inputs if t.dtype == dtype], non_blocking=True
        )


class Lease:
    """A capture in use. It returns to its pool when its gradient can no longer be asked for."""

    def __init__(self, capture: Capture, free: list[Capture]) -> None:
        self.capture, self.free = capture, free

    def __del__(self) -> None:
        self.free.append(self.capture)


class _Replay(torch.autograd.Function):
    """The result of a replayed capture, as a function of the tensor it ran with."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, lease: Lease) -> Tensor:
        ctx.save_for_backward(leaf)  # read again in backward only to notice a second one, or a change in place
        ctx.lease = lease
        return lease.capture.out.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        _, lease = ctx.saved_tensors, ctx.lease
        if not graph_is_kept():
            ctx.lease = None
        return lease.capture.gradient(grad_out), None


class GraphCache:
    """The captures of one loss, by key and shape. The first call of a shape runs as usual; the second is captured.

    Captures belong to this process and this object: a deep copy or a pickle starts empty.
    """

    def __init__(self) -> None:
        self.free: dict[Any, list[Capture]] = {}
        self.refused: set[Any] = set()
        self._held: WeakKeyDictionary[Capture, int] = WeakKeyDictionary()  # bytes of those that are free or in use
        self._calls = 0

    def __reduce__(self) -> tuple[type["GraphCache"], tuple[()]]:
        return GraphCache, ()

    def clear(self) -> None:
        """Free the memory of all captures. A capture whose loss still awaits its backward pass is freed after it."""
        self.free.clear()
        self.refused.clear()

    def begin(self, inputs: Inputs) -> None:
        """Build relevance for a call with these inputs that will follow, if it has been captured."""
        capture = next((free[-1] for free in self.free.values() if free and free[-1].takes(inputs)), None)
        if capture is not None:
            capture.begin(inputs)

    def run(self, key: Hashable, leaf: Tensor, inputs: Inputs, program: GraphProgram) -> tuple[Tensor, ...] | None:
        """What `program.loss` returns, or None where the call must run as usual. Copy further outputs at once."""
        leaf = _widened(leaf)
        outputs = self.replay(key, leaf, inputs)
        if outputs is not None:
            return outputs
        shaped = _shaped(key, leaf, inputs)
        hashed, free = self._find(shaped)
        if not hashed or shaped in self.refused:
            return None
        if free is None:
            self.free[shaped] = []
            return None
        needed = held_bytes(leaf, inputs, row_bytes=program.row_bytes)
        if not self._has_room(needed, memory_of(leaf.device)):
            return None
        capture = self._capture(leaf, inputs, program)  # all are in use, or classes grew
        if capture is None:
            self.refused.add(shaped)
            return None
        self._held[capture] = needed
        self._replay(capture, leaf, inputs)
        return _Replay.apply(leaf, Lease(capture, free)), *capture.others

    def replay(self, key: Hashable, leaf: Tensor, inputs: Inputs) -> tuple[Tensor, ...] | None:
        """The same by a capture that there is already; None where there is none for these shapes and classes."""
        leaf = _widened(leaf)
        _, free = self._find(_shaped(key, leaf, inputs))
        if not free:
            return None
        capture = free.pop()
        if _exceeds(self._replay(capture, leaf, inputs), capture.widths):
            return None
        return _Replay.apply(leaf, Lease(capture, free)), *capture.others

    def _replay(self, capture: Capture, leaf: Tensor, inputs: Inputs) -> Widths:
        self._calls += 1
        capture.last_call = self._calls
        return capture.replay(leaf, inputs)

    def _has_room(self, needed: int, memory: float) -> bool:
        """Whether one more capture fits, if need be in the place of those that have not been used for long."""
        most = ALL_CALLS * memory - needed
        if sum(self._held.values()) > most:
            for free in self.free.values():
                free[:] = (capture for capture in free if self._calls - capture.last_call < STALE)
        return not self._held or sum(self._held.values()) <= most

    def _find(self, shaped: Hashable) -> tuple[bool, list[Capture] | None]:
        """Whether a key has a hash, which the types of its parts do not tell, and its captures if there are any."""
        try:
            return True, self.free.get(shaped)
        except TypeError:  # an objective without a hash, which may change between calls
            return False, None

    @staticmethod
    def _capture(leaf: Tensor, inputs: Inputs, program: GraphProgram) -> Capture | None:
        widths = _rounded(program.build(*inputs)[1])
        sizes = (queries * width for queries, width in zip(program.num_queries, widths, strict=True))
        if any(size > relevance.ONE_GROUP for size in sizes):
            return None
        try:
            with no_garbage_collection():
                return Capture(leaf, inputs, widths, program)
        except RuntimeError:  # an objective that synchronises cannot be captured
            forget_failed_capture(leaf.device)
            return None


def _shaped(key: Hashable, leaf: Tensor, inputs: Inputs) -> Hashable:
    return (key, *((tensor.shape, tensor.dtype, tensor.device) for tensor in (leaf, *inputs)))


def _exceeds(most: Widths, widths: Widths) -> bool:
    return any(number > width for number, width in zip(most, widths, strict=True))
