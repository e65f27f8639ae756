"""Losses as CUDA graphs: up to some 16,000 rows a loss is hundreds of short launches and the host is the bottleneck.

A capture holds static copies of the inputs and three graphs: what is relevant -> lists, embeddings or scores -> loss,
incoming -> gradient. What comes back for a loss that is one number only scales its gradient, so that is made before anybody
asks: while the GPU runs one graph, the host starts the next. A capture is leased to one call from its forward pass until that
call's graph is gone, so several calls may be pending at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad._device import forget_failed_capture
from rankgrad.ops.triton.embeddings import ONE_GROUP, rounded_width

# Rows of a batch up to which calls are captured. On an H200 a call of 4,096 rows took 9 ms without and 1 ms with graphs; at
# 65,536 it is 39 against 36 ms, and what a call needs, more than 1 GB there, would stay with the loss.
MOST_ROWS = 16_384

Given = tuple[Tensor, ...]
Widths = Sequence[int]


@dataclass(frozen=True)
class Steps:
    """A loss in two steps that never wait for the device.

    lists: from labels or relevance, and what else is given, to anything, and to [K] most relevant items of a query, for each
        of K kinds of lists.
    loss: from the tensor that gets a gradient, what `lists` gave, and K widths that are at least these numbers, to the loss,
        and other tensors that the caller wants to see.
    queries: of each kind.
    """

    queries: Sequence[int]
    lists: Callable[..., tuple[Any, Tensor]]
    loss: Callable[[Tensor, Any, Widths], tuple[Tensor, ...]]

    def run(self, leaf: Tensor, given: Given) -> tuple[Tensor, ...]:
        """Both, waiting for the numbers in between. Compiles every kernel that a capture of them needs."""
        begun, most = self.lists(*given)
        return self.loss(leaf, begun, _rounded(most))


def _rounded(most: Tensor) -> list[int]:
    return [rounded_width(number) for number in most.tolist()]


def side_by_side(device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """What two independent calls give, as two branches of a graph where one is being captured."""
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

    def __init__(self, leaf: Tensor, given: Given, widths: Widths, steps: Steps) -> None:
        self.widths = widths
        self.given = tuple(tensor.clone() for tensor in given)
        self.leaf = leaf.detach().clone().requires_grad_()
        self.most = torch.zeros(len(widths), dtype=torch.long, pin_memory=True)  # relevant items of a query, as last read
        pool = torch.cuda.graph_pool_handle()
        self.on_given, self.on_leaf, self.on_incoming = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(self.on_given, pool=pool, capture_error_mode="thread_local"):
            begun, most = steps.lists(*self.given)
            self.most.copy_(most, non_blocking=True)
        with torch.cuda.graph(self.on_leaf, pool=pool, capture_error_mode="thread_local"), torch.enable_grad():
            out, *self.others = steps.loss(self.leaf, begun, widths)
        self.out = out.detach()
        self.incoming = torch.ones_like(self.out)
        with torch.cuda.graph(self.on_incoming, pool=pool, capture_error_mode="thread_local"):
            (self.d_leaf,) = torch.autograd.grad(out, self.leaf, self.incoming, retain_graph=True)
        self.held = begun, out  # the graphs read and write their memory

    def read(self, leaf: Tensor, given: Given) -> list[int]:
        """Runs a call and returns the most relevant items of a query while the GPU is still at it."""
        _copy(self.given, given)
        self.on_given.replay()
        known = torch.cuda.Event()
        known.record()
        self.leaf.detach().copy_(leaf)
        self.on_leaf.replay()
        if not self.out.ndim:
            self.on_incoming.replay()
        known.synchronize()
        most: list[int] = self.most.tolist()
        return most

    def gradient(self, incoming: Tensor) -> Tensor:
        """Of the leaf, in memory of its own."""
        if not self.out.ndim:
            return self.d_leaf * incoming
        self.incoming.copy_(incoming)
        self.on_incoming.replay()
        return self.d_leaf.clone()


def _copy(to: Given, given: Given) -> None:
    """All of a type in one launch."""
    for dtype in {tensor.dtype for tensor in to}:
        torch._foreach_copy_([t for t in to if t.dtype == dtype], [t for t in given if t.dtype == dtype], non_blocking=True)


class Lease:
    """A capture in use. It goes back to its pool when nobody can ask for its gradient any more."""

    def __init__(self, capture: Capture, free: list[Capture]) -> None:
        self.capture, self.free = capture, free

    def __del__(self) -> None:
        self.free.append(self.capture)


class _Replay(torch.autograd.Function):
    """The result of a capture that has run, as a function of the tensor it ran with."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, lease: Lease) -> Tensor:
        ctx.lease = lease
        return lease.capture.out.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        return ctx.lease.capture.gradient(incoming), None


class Graphs:
    """The captures of one loss, by shape. The first call of a shape runs as usual; the second is captured."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Capture]] = {}
        self.refused: set[Any] = set()

    def run(self, settings: Any, leaf: Tensor, given: Given, steps: Steps) -> tuple[Tensor, ...] | None:
        """What `steps.loss` gives, or None where the call must run as usual. What is not the loss is to be copied at once."""
        key = (settings, *((tensor.shape, tensor.dtype, tensor.device) for tensor in (leaf, *given)))
        if key in self.refused:
            return None
        if key not in self.free:
            self.free[key] = []
            return None
        free = self.free[key]
        capture = free.pop() if free else None
        if capture is None or _exceeds(capture.read(leaf, given), capture.widths):  # none at hand, or classes grew
            capture = self._capture(leaf, given, steps)
            if capture is None:
                self.refused.add(key)
                return None
            capture.read(leaf, given)
        others = capture.others
        return _Replay.apply(leaf, Lease(capture, free)), *others

    @staticmethod
    def _capture(leaf: Tensor, given: Given, steps: Steps) -> Capture | None:
        widths = _rounded(steps.lists(*given)[1])
        if any(queries * width > ONE_GROUP for queries, width in zip(steps.queries, widths, strict=True)):
            return None
        try:
            return Capture(leaf, given, widths, steps)
        except RuntimeError:  # an objective that waits for the device cannot be captured
            forget_failed_capture(leaf.device)
            return None


def _exceeds(most: Widths, widths: Widths) -> bool:
    return any(number > width for number, width in zip(most, widths, strict=True))
