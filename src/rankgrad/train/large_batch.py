"""Gradients of batches that do not fit in memory: multistage back-propagation for any module and any loss.

    step = LargeBatch(model, loss, chunk_size=200)
    step(images, labels)        # the gradients of the whole batch are now in model.parameters()

A rank loss needs all embeddings of the batch at once but the activations of none of them. So: embed the batch in chunks
without a graph, take the loss and its gradient with respect to the embeddings on the whole batch, then run each chunk once
more with a graph and send its rows of that gradient through it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankgrad._checks import check_count, shape_of
from rankgrad.train.activation_budget import FirstStep, Keeping
from rankgrad.train.gradient_check import CheckReport, GradientCheck, live_batch_norms
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.protocols import Loss
from rankgrad.train.sharding import exchanges, is_divided
from rankgrad.train.snapshot import RandomState

Scale = float | Callable[[Tensor], Tensor]


class LargeBatch:
    """One backward pass of `loss(model(images), labels)` over a batch of any size, `chunk_size` images at a time.

    The gradients are those of the whole batch, up to the order of sums, whenever an image's embedding does not depend on
    the rest of its chunk. Random layers draw the same in both passes of a chunk. Batch normalisation in training mode is
    refused, because its statistics would be those of a chunk; a batch of one chunk is a plain step, where it is allowed.
    `step.check(images, labels)` compares with the plain computation on your own model.

    The second forward pass costs about a third of the time. `keep` chunks keep their graph from the first pass and skip it:
    "auto" keeps what fits, on a GPU by what the first step was seen to need, on a CPU by half of the memory available
    (none where the system does not tell).

    A model wrapped in DistributedDataParallel or FSDP2 exchanges gradients once, with the last chunk. Such wrappers average,
    which `DistributedRankLoss` allows for.

    Args:
        model: from a chunk of images to embeddings [items, dimensions].
        loss: from embeddings and labels to one value. Its own parameters get their gradients too.
        chunk_size: images that go through the model at once, 0 for all.
        keep: "auto", or how many chunks to keep.
        autocast: dtype of an autocast region around model and loss; None for whatever region the call stands in.
        processes: those that take the step together. If one runs out of memory all raise, and none waits for it; and FSDP2,
            which needs as many passes on each, gets as many chunks.

    After a call `embeddings` and `embedding_gradient` hold those of the batch.
    """

    embeddings: Tensor
    embedding_gradient: Tensor

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        chunk_size: int,
        keep: int | Literal["auto"] = "auto",
        autocast: torch.dtype | None = None,
        *,
        processes: Processes = ALONE,
    ) -> None:
        check_count(chunk_size, name="chunk_size", caller="LargeBatch", least=0)
        self.processes = processes
        self.model, self.loss, self.chunk_size, self.autocast = model, loss, chunk_size, autocast
        self._keeping = Keeping(keep)

    def __call__(self, images: Any, labels: Tensor, *, scale: Scale = 1.0) -> Tensor:
        """Adds the gradients of the batch to `.grad` and returns the loss, detached and unscaled.

        Args:
            images: a tensor, or lists, tuples and dicts of tensors, with one row per item; each is cut along its first
                dimension and moved to the model's device chunk by chunk, so the batch itself may stay on the CPU.
            labels: one per item.
            scale: factor of the loss in the backward pass, or a function such as `GradScaler.scale`.
        """
        cuts = self._cuts(images, labels)
        if len(cuts) > 1:
            refuse_live_batch_norm(self.model)
        kind = self._kind(images)
        kept = self._keeping.count(kind, len(cuts), self.device)
        if is_divided(self.model):
            kept = -self.processes.largest(-kept)
        first = self._keeping.step(kind, len(cuts), self.model, leaves(images), self.device)
        with torch.enable_grad(), self._region():
            value = self._step(images, labels, cuts, scale, kept, first)
        if first:
            self._keeping.learn(kind, first)
        return value

    def check(self, images: Any, labels: Tensor) -> CheckReport:
        """Compares the gradients of this batch with those of a plain backward pass; nothing is left changed.

        The batch must be small enough for the plain pass. With random layers, which draw anew for every chunk, the plain pass
        goes chunk by chunk as well, keeping all graphs.
        """
        cuts = self._cuts(images, labels)
        with torch.enable_grad(), self._region():
            return GradientCheck(
                self.model,
                self.loss,
                embed=lambda cut: self._embed(images, cut, self.device),
                # nothing is kept, so that every chunk is seen to be repeated
                staged=lambda: self._step(images, labels, cuts, scale=1.0, kept=0),
                labels=labels,
                cuts=cuts,
                device=self.device,
            ).report()

    def shrink(self, items: int) -> str | None:
        """Makes the next call on `items` need less memory and says how; None where one image at a time is too much."""
        if self._keeping.give_up():
            return "no chunk is kept any more"
        size = min(self.chunk_size or items, items)
        if size == 1:
            return None
        self.chunk_size = (size + 1) // 2
        self._keeping.forget()
        return f"chunk_size {size} -> {self.chunk_size}"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def _step(
        self, images: Any, labels: Tensor, cuts: list[slice], scale: Scale, kept: int, first: FirstStep | None = None
    ) -> Tensor:
        device, last = self.device, len(cuts) - 1
        if last and exchanges(self.model):
            kept = min(kept, last)  # such a model must see the pass that exchanges directly before its backward
        graphs: dict[int, Tensor] = {}
        states: dict[int, RandomState] = {}
        parts = []
        with self._agreed():
            for i, cut in enumerate(cuts):
                with self._exchange(last == 0):
                    if i < kept:
                        with first.chunk() if first and i == 0 else nullcontext():
                            graphs[i] = self._embed(images, cut, device)
                        parts.append(graphs[i].detach())
                    else:
                        states[i] = RandomState.of(device)
                        with torch.no_grad():
                            parts.append(self._embed(images, cut, device))
        # casts of weights that were made without a graph must not serve the pass with one
        torch.clear_autocast_cache()
        embeddings = torch.cat(parts).requires_grad_()
        value = self._loss_and_gradient(embeddings, labels, scale)
        gradient = torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
        after = RandomState.of(device)

        def go_back(i: int) -> None:
            with self._exchange(i == last):
                if i in states:
                    states[i].restore()
                output = graphs.pop(i) if i in graphs else self._embed(images, cuts[i], device)
                if output.requires_grad:
                    with _without_autocast(device):
                        output.backward(gradient[cuts[i]])

        with self._agreed():
            for i in range(last):
                go_back(i)
        go_back(last)
        after.restore()
        self.embeddings, self.embedding_gradient = embeddings.detach(), gradient
        return value

    def _loss_and_gradient(self, embeddings: Tensor, labels: Tensor, scale: Scale) -> Tensor:
        value = self.loss(embeddings, labels)
        if value.numel() != 1:
            raise ValueError(f"LargeBatch: loss must return one value for the batch, got shape {shape_of(value)}")
        with _without_autocast(embeddings.device):
            (scale(value) if callable(scale) else value * scale).sum().backward()
        return value.detach().reshape(())

    def _embed(self, images: Any, cut: slice, device: torch.device) -> Tensor:
        output = self.model(rows(images, cut, device))
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != cut.stop - cut.start:
            got = f"shape {shape_of(output)}" if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"LargeBatch: model must return embeddings [{cut.stop - cut.start}, dimensions], got {got}")
        return output

    def _cuts(self, images: Any, labels: Tensor) -> list[slice]:
        items = len_of(images)
        if len(labels) != items:
            raise ValueError(f"LargeBatch: labels must be one per image, {items}, got {len(labels)}")
        size = self.chunk_size or items
        if is_divided(self.model):
            chunks, least = self.processes.largest(-(-items // size)), -self.processes.largest(-items)
            if chunks > least:
                raise ValueError(
                    f"LargeBatch: FSDP needs as many chunks on every process, and {least} images cannot be cut into {chunks}: "
                    "let the batch be a multiple of the processes, or the chunk larger"
                )
            return [slice(items * i // chunks, items * (i + 1) // chunks) for i in range(chunks)]
        return [slice(start, min(start + size, items)) for start in range(0, items, size)]

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """All processes run out of memory here, or none: it is raised by all before they wait for each other elsewhere."""
        if self.processes.size == 1:
            yield
            return
        mine: torch.OutOfMemoryError | None = None
        try:
            yield
        except torch.OutOfMemoryError as error:
            mine = error
        if self.processes.any(mine is not None):
            raise mine or torch.OutOfMemoryError("another process ran out of memory")

    def _region(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def _exchange(self, now: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged between processes in the context, or are not yet."""
        set_sync = getattr(self.model, "set_requires_gradient_sync", None)
        if callable(set_sync):  # FSDP2
            set_sync(now)
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if callable(no_sync) and not now else nullcontext()

    def _kind(self, images: Any) -> Hashable:
        return self.chunk_size, tuple(leaf.shape[1:] for leaf in leaves(images))


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


def len_of(images: Any) -> int:
    """How many items a batch has: the first dimension of all its tensors."""
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(images)}
    if len(lengths) != 1 or None in lengths:
        got = ", ".join(sorted(map(str, lengths))) or "no tensor"
        raise ValueError(f"LargeBatch: the tensors of a batch must share their first dimension, got {got}")
    items = int(lengths.pop() or 0)
    if not items:
        raise ValueError("LargeBatch: a batch must hold at least one image, got none")
    return items


def rows(tree: Any, cut: slice, device: torch.device) -> Any:
    """The items `cut` of a batch, on `device`."""
    if isinstance(tree, Tensor):
        return tree[cut].to(device, non_blocking=True)
    if isinstance(tree, dict):
        return type(tree)((key, rows(value, cut, device)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rows(value, cut, device) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(rows(value, cut, device) for value in tree)
    return tree


def refuse_live_batch_norm(model: nn.Module) -> None:
    """Statistics of a chunk are not those of the batch, and would be updated twice per step."""
    names = live_batch_norms(model)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"LargeBatch: batch normalisation must not use the statistics of a chunk, but {', '.join(names[:3])}{more} "
            "would. Call .eval() on these layers after model.train() (batch_norm='frozen' in a recipe), use GroupNorm, or "
            "let the whole batch through at once with chunk_size=0"
        )


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A backward pass repeats the precision of its forward pass by itself; autocast would round it once more."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
