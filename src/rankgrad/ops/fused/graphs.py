"""Batches as CUDA graphs: up to some 16,000 rows a loss is hundreds of short launches and the host is the bottleneck.

A capture holds static copies of the inputs and three graphs: labels -> lists, embeddings -> loss, incoming -> gradient.
It is leased to one call from its forward pass until that call's graph is gone, so several calls may be pending at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.engine import Plan, backward_pass, forward_pass
from rankgrad.ops.fused.door import ONE_GROUP, rounded_width

# Rows of a batch up to which calls are captured. On an H200 a call of 4,096 rows took 9 ms without and 1 ms with graphs; at
# 65,536 it is 39 against 36 ms, and what a call needs, more than 1 GB there, would stay with the loss.
MOST_ROWS = 16_384


@dataclass(frozen=True)
class Recipe:
    """A loss of a batch in steps that never wait for the device."""

    lists: Callable[[Tensor], Any]  # of labels, or of relevance where scores are given
    shares: Callable[[Tensor], tuple[Tensor, Tensor]]  # of numbers of relevant items: used queries, share of one
    prepare: Callable[[Tensor], Tensor]  # embeddings as they enter the scores, or the scores; differentiable
    plan: Callable[[Any, Tensor, int], Plan]  # of lists, share, most relevant items of a query
    reduce: Callable[[Tensor, Tensor], Tensor]  # losses and share to what the caller gets


class Capture:
    """One loss at one shape; `width` is the most relevant items a query may have."""

    def __init__(self, embeddings: Tensor, labels: Tensor, width: int, recipe: Recipe) -> None:
        self.width = width
        self.labels = labels.clone()
        self.most = torch.zeros((), dtype=torch.long, pin_memory=True)  # relevant items of a query, as last read
        self.embeddings = embeddings.detach().clone().requires_grad_()
        pool = torch.cuda.graph_pool_handle()
        self.on_labels, self.on_embeddings, self.on_incoming = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(self.on_labels, pool=pool, capture_error_mode="thread_local"):
            lists = recipe.lists(self.labels)
            self.most.copy_(lists.num_relevant.amax(), non_blocking=True)
            self.used, unit = recipe.shares(lists.num_relevant)
        with torch.cuda.graph(self.on_embeddings, pool=pool, capture_error_mode="thread_local"):
            with torch.enable_grad():
                prepared = recipe.prepare(self.embeddings)
            losses, passed = forward_pass(recipe.plan(lists, unit, width), (prepared.detach(),), wants_gradient=True)
            self.out = recipe.reduce(losses, unit)
        self.incoming = torch.ones_like(self.out)
        with torch.cuda.graph(self.on_incoming, pool=pool, capture_error_mode="thread_local"):
            per_query = self.incoming if self.incoming.ndim else (self.incoming * unit).expand(len(labels))
            (d_prepared,) = backward_pass(passed, per_query)
            (self.d_embeddings,) = torch.autograd.grad(prepared, self.embeddings, d_prepared, retain_graph=True)
        self.held = lists, unit, passed, prepared  # the graphs read and write their memory

    def read(self, labels: Tensor, embeddings: Tensor) -> int:
        """Runs the labels and the embeddings and returns the most relevant items of a query while the GPU is still at it."""
        self.labels.copy_(labels)
        self.on_labels.replay()
        known = torch.cuda.Event()
        known.record()
        self.embeddings.detach().copy_(embeddings)
        self.on_embeddings.replay()
        known.synchronize()
        return int(self.most)


class Lease:
    """A capture in use. It goes back to its pool when nobody can ask for its gradient any more."""

    def __init__(self, capture: Capture, free: list[Capture]) -> None:
        self.capture, self.free = capture, free

    def __del__(self) -> None:
        self.free.append(self.capture)


class _Replay(torch.autograd.Function):
    """The result of a capture that has run, as a function of the embeddings it ran with."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, lease: Lease) -> Tensor:
        ctx.lease = lease
        return lease.capture.out.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        capture = ctx.lease.capture
        capture.incoming.copy_(incoming)
        capture.on_incoming.replay()
        return capture.d_embeddings.clone(), None


class Graphs:
    """The captures of one loss, by shape. The first call of a shape runs as usual; the second is captured."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Capture]] = {}
        self.refused: set[Any] = set()

    def run(self, key: Any, embeddings: Tensor, labels: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor] | None:
        """Loss and used queries of the call, or None where it must run as usual."""
        if key in self.refused:
            return None
        if key not in self.free:
            self.free[key] = []
            return None
        free = self.free[key]
        capture = free.pop() if free else None
        if capture is None or capture.read(labels, embeddings) > capture.width:  # none at hand, or classes grew
            capture = self._capture(embeddings, labels, recipe)
            if capture is None:
                self.refused.add(key)
                return None
            capture.read(labels, embeddings)
        used = capture.used.clone()
        return _Replay.apply(embeddings, Lease(capture, free)), used

    @staticmethod
    def _capture(embeddings: Tensor, labels: Tensor, recipe: Recipe) -> Capture | None:
        width = rounded_width(int(recipe.lists(labels).num_relevant.amax()))
        if len(labels) * width > ONE_GROUP:
            return None
        try:
            return Capture(embeddings, labels, width, recipe)
        except RuntimeError:  # an objective that waits for the device cannot be captured
            return None
