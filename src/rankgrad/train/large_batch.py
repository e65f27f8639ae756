"""Gradients of batches that do not fit in memory: multistage backpropagation for any model and any loss.

    step = LargeBatch(model, loss, chunk_size=200)
    step(images, labels)        # the gradients of the whole batch are now in model.parameters()

A rank loss needs all embeddings of the batch at once, but no activations. So embed the batch in chunks without an autograd
graph, compute the loss and its gradient with respect to the embeddings on the whole batch, then run each chunk once more with a
graph and backpropagate its rows of that gradient.
"""

from collections.abc import Callable, Hashable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from rankgrad._checks import check_count, check_labels_or_relevance, shape_of
from rankgrad._device import autocast_disabled
from rankgrad.train.activation_budget import ActivationBudget, MemoryProbe
from rankgrad.train.batch_tree import leaves, num_rows, select_rows
from rankgrad.train.errors import is_out_of_memory
from rankgrad.train.gradient_check import CheckReport, GradientCheck, live_batch_norms
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.sharding import is_distributed, is_sharded
from rankgrad.train.snapshot import RngSnapshot

if TYPE_CHECKING:
    from rankgrad.train.graphed_model import GraphedModel

Loss: TypeAlias = Callable[[Tensor, Any], Tensor]
Scale: TypeAlias = float | Callable[[Tensor], Tensor]


@runtime_checkable
class GatheringLoss(Protocol):
    """A loss over the embeddings of all processes around the loss of one, such as `DistributedRankLoss`.

    Attributes:
        loss: the loss of one process.
        gathered: embeddings and labels of all processes in the last call.
    """

    loss: Any
    gathered: tuple[Tensor, Any] | None


def unwrap_loss(loss: Loss) -> Loss:
    """The loss of one process, whose state does not depend on the number of processes."""
    inner: Loss = loss.loss if isinstance(loss, GatheringLoss) else loss
    return inner


class LargeBatch:
    """One backward pass of `loss(model(images), labels)` over a batch of any size, `chunk_size` images at a time.

    The gradients are those of the whole batch, up to the order of sums, whenever an image's embedding does not depend on
    the rest of its chunk. Random layers draw the same numbers in both passes of a chunk. Batch normalisation in training mode
    is refused, because its statistics would be those of a chunk; a batch of one chunk is a plain step, where it is allowed.
    `step.check(images, labels)` compares with the plain computation on your own model.

    The second forward pass costs about a third of the time. `keep` chunks keep their activations from the first pass and skip
    it: "auto" keeps what fits, on a GPU by what the first step needed, on a CPU by half of the available memory (none where the
    system does not tell).

    A model wrapped in DistributedDataParallel or FSDP2 synchronises gradients once, with the last chunk. Such wrappers average,
    which `DistributedRankLoss` allows for.

    Args:
        model: maps a chunk of images to embeddings [items, dimensions].
        loss: maps embeddings and labels to one value. Its own parameters get their gradients too.
        chunk_size: images per forward pass, 0 for all.
        keep: "auto", or the number of chunks to keep.
        autocast: dtype of an autocast region around model and loss; None for the region of the caller.
        processes: those that take the step together. If one runs out of memory, all raise and none waits for it; with FSDP2,
            which needs the same number of passes on each, all have the same number of chunks.

    After a call, `embeddings` and `embedding_gradient` hold those of the batch.
    """

    embeddings: Tensor
    embedding_gradient: Tensor
    # on a GPU, recorded in the last call after the loss and before the backward pass of the model
    ranked: torch.cuda.Event | None = None

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
        self._budget = ActivationBudget(keep)
        self._graphs: GraphedModel | None = None

    def __call__(self, images: Any, labels: Any = None, *, relevance: Any = None, scale: Scale = 1.0) -> Tensor:
        """Adds the gradients of the batch to `.grad` and returns the loss, detached and unscaled.

        Args:
            images: a tensor, or nested lists, tuples and dicts of tensors, with one row per item. They are moved to the model's
                device chunk by chunk, so the batch itself may stay on the CPU.
            labels: one per item, or what else the loss takes in their place.
            relevance: in place of labels, `Pairs` of rows of the batch or `Levels`.
            scale: factor of the loss in the backward pass, or a function such as `GradScaler.scale`.
        """
        check_labels_or_relevance(labels, relevance, caller="LargeBatch")
        labels = relevance if labels is None else labels
        cuts = self._cuts(images, labels)
        if len(cuts) > 1:
            check_no_live_batch_norm(self.model)
        signature = self._signature(images)
        kept = self._num_kept(signature, len(cuts))
        probe = self._budget.probe(signature, len(cuts), self.model, leaves(images), self.device)
        with torch.enable_grad(), self._region():
            value = self._step(images, labels, cuts, scale, kept, probe, self._graphs)
        if probe:
            self._budget.record(signature, probe)
        return value

    def record(self, graphs: "GraphedModel", images: Tensor, labels: Tensor) -> str | None:
        """Runs all chunks like those of this batch as CUDA graphs from now on; the reason where that is not possible.

        If memory does not suffice, fewer chunks are kept.
        """
        cuts = self._cuts(images, labels)
        if len(cuts) > 1:
            check_no_live_batch_norm(self.model)
        chunk = select_rows(images, cuts[0], self.device)
        # a shorter last chunk runs layer by layer
        chunks = sum(cut.stop - cut.start == len(chunk) for cut in cuts)
        kept = min(self._num_kept(self._signature(images), len(cuts)), chunks)
        while True:
            try:
                reason = graphs.record(chunk, kept=kept, others=kept < chunks)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            else:
                break
            torch.cuda.empty_cache()
            if len(cuts) == 1 or kept == 0:
                break
            kept //= 2
            self._budget.limit(kept)
        self._graphs = graphs if reason is None else None
        return reason

    def run_eagerly(self) -> bool:
        """Drops CUDA graphs; False if there are none."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.release()
        return graphs is not None

    def check(self, images: Any, labels: Any) -> CheckReport:
        """Compares the gradients of this batch with those of a plain backward pass; nothing is changed.

        The batch must be small enough for the plain pass. With random layers, which draw anew for every chunk, the plain pass
        goes chunk by chunk as well and keeps all activations.
        """
        cuts = self._cuts(images, labels)
        with torch.enable_grad(), self._region():
            return GradientCheck(
                self.model,
                self.loss,
                embed=lambda cut: self._embed(images, cut, self.device),
                # nothing is kept, so that every chunk is repeated
                staged=lambda: self._step(images, labels, cuts, scale=1.0, kept=0),
                labels=labels,
                cuts=cuts,
                device=self.device,
            ).report()

    def shrink(self, items: int) -> str | None:
        """Makes the next call on `items` need less memory and says how; None where one image at a time is too much."""
        if self._budget.keep_none():
            return "no chunk is kept any more"
        size = min(self.chunk_size or items, items)
        if size == 1:
            return None
        self.chunk_size = (size + 1) // 2
        self._budget.reset()
        return f"chunk_size {size} -> {self.chunk_size}"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def _step(
        self,
        images: Any,
        labels: Any,
        cuts: list[slice],
        scale: Scale,
        kept: int,
        probe: MemoryProbe | None = None,
        graphs: "GraphedModel | None" = None,
    ) -> Tensor:
        device, last = self.device, len(cuts) - 1
        if last and is_distributed(self.model):
            kept = min(kept, last)  # such a model must see the pass that synchronises directly before its backward
        chunks: list[_Chunk] = []
        for i, cut in enumerate(cuts):
            if graphs is not None and isinstance(images, Tensor) and graphs.accepts(images[cut], i):
                chunks.append(_GraphedChunk(graphs, partial(select_rows, images, cut, device), device, i))
            else:
                chunks.append(_EagerChunk(partial(self._embed, images, cut, device), device, keep=i < kept))
        prepare_labels = getattr(self.loss, "prepare_labels", None)
        if callable(prepare_labels):
            prepare_labels(labels)
        if graphs is not None:
            graphs.begin_step()
        parts = []
        with self._agreed():
            for i, chunk in enumerate(chunks):
                with self._sync(last == 0), probe.chunk() if probe and i == 0 else nullcontext():
                    parts.append(chunk.forward())
        # casts of weights that were made without a graph must not be used in the pass with one
        torch.clear_autocast_cache()
        embeddings = torch.cat(parts).requires_grad_()
        self.embeddings = embeddings.detach()
        value = self._loss_and_gradient(embeddings, labels, scale)
        gradient = torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
        if device.type == "cuda":
            self.ranked = torch.cuda.Event()
            self.ranked.record(torch.cuda.current_stream(device))
        after = RngSnapshot.of(device)

        def backward(i: int) -> None:
            with self._sync(i == last):
                chunks[i].backward(gradient[cuts[i]])

        with self._agreed():
            for i in range(last):
                backward(i)
        backward(last)
        if graphs is not None:
            graphs.end_step()
        after.restore()
        self.embedding_gradient = gradient
        return value

    def _num_kept(self, signature: Hashable, chunks: int) -> int:
        kept = self._budget.count(signature, chunks, self.device)
        return -self.processes.all_max(-kept) if is_sharded(self.model) else kept

    def _loss_and_gradient(self, embeddings: Tensor, labels: Any, scale: Scale) -> Tensor:
        value = self.loss(embeddings, labels)
        if value.numel() != 1:
            raise ValueError(f"LargeBatch: loss must return one value for the batch, got shape {shape_of(value)}")
        with autocast_disabled(embeddings.device):
            scaled = scale(value) if callable(scale) else value if scale == 1 else value * scale
            scaled.reshape(()).backward()
        return value.detach().reshape(())

    def _embed(self, images: Any, cut: slice, device: torch.device) -> Tensor:
        output = self.model(select_rows(images, cut, device))
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != cut.stop - cut.start:
            got = f"shape {shape_of(output)}" if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"LargeBatch: model must return embeddings [{cut.stop - cut.start}, dimensions], got {got}")
        return output

    def _cuts(self, images: Any, labels: Any) -> list[slice]:
        items = num_rows(images)
        if isinstance(labels, Sized) and len(labels) != items:
            raise ValueError(f"LargeBatch: labels must be one per image, {items}, got {len(labels)}")
        size = self.chunk_size or items
        if is_sharded(self.model):
            chunks, least = self.processes.all_max(-(-items // size)), -self.processes.all_max(-items)
            if chunks > least:
                raise ValueError(
                    f"LargeBatch: FSDP needs the same number of chunks on every process, and {least} images cannot be cut into "
                    f"{chunks}: make the batch a multiple of the number of processes, or the chunks larger"
                )
            return [slice(items * i // chunks, items * (i + 1) // chunks) for i in range(chunks)]
        return [slice(start, min(start + size, items)) for start in range(0, items, size)]

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """If one process runs out of memory here, all raise, before they wait for each other elsewhere."""
        if self.processes.size == 1:
            yield
            return
        mine: Exception | None = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            mine = error
        if self.processes.all_any(mine is not None):
            raise mine or torch.OutOfMemoryError("another process ran out of memory")

    def _region(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def _sync(self, now: bool) -> AbstractContextManager[Any]:
        """Whether backward passes inside the context synchronise gradients between processes."""
        set_sync = getattr(self.model, "set_requires_gradient_sync", None)
        if callable(set_sync):  # FSDP2
            set_sync(now)
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if callable(no_sync) and not now else nullcontext()

    def _signature(self, images: Any) -> Hashable:
        return self.chunk_size, tuple(leaf.shape[1:] for leaf in leaves(images))


class _Chunk(Protocol):
    """The two passes of a chunk."""

    def forward(self) -> Tensor: ...

    def backward(self, gradient: Tensor) -> None: ...


class _EagerChunk:
    """A chunk that goes through the model layer by layer.

    Args:
        embed: embeds it.
        device: of the model.
        keep: keep its activations for the backward pass.
    """

    def __init__(self, embed: Callable[[], Tensor], device: torch.device, *, keep: bool) -> None:
        self.embed, self.device, self.keep = embed, device, keep
        self.output: Tensor | None = None
        self.rng: RngSnapshot | None = None

    def forward(self) -> Tensor:
        if self.keep:
            self.output = self.embed()
            return self.output.detach()
        self.rng = RngSnapshot.of(self.device)
        with torch.no_grad():
            return self.embed()

    def backward(self, gradient: Tensor) -> None:
        if self.rng is not None:
            self.rng.restore()
        output = self.embed() if self.output is None else self.output
        self.output = None
        if output.requires_grad:
            with autocast_disabled(self.device):
                output.backward(gradient)


class _GraphedChunk:
    """A chunk whose passes are CUDA graphs.

    Args:
        graphs: of the model.
        images: moves the images to the device.
        device: of the model.
        index: position in the batch; the first ones keep their activations.
    """

    def __init__(self, graphs: "GraphedModel", images: Callable[[], Tensor], device: torch.device, index: int) -> None:
        self.graphs, self.images, self.device, self.index = graphs, images, device, index
        self.rng: RngSnapshot | None = None

    def forward(self) -> Tensor:
        if self.index < self.graphs.num_kept:
            return self.graphs.forward_kept(self.index, self.images())
        self.rng = RngSnapshot.of(self.device)
        return self.graphs.forward(self.images())

    def backward(self, gradient: Tensor) -> None:
        if self.rng is None:
            self.graphs.backward_kept(self.index, gradient)
        else:
            self.rng.restore()
            self.graphs.repeat(self.images(), gradient)


def check_no_live_batch_norm(model: nn.Module) -> None:
    """Refuses batch normalisation in training mode: it would use the statistics of a chunk, and update them twice per step."""
    names = live_batch_norms(model)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"LargeBatch: {', '.join(names[:3])}{more} would normalise with the statistics of a chunk instead of the batch. "
            "Call .eval() on these layers after model.train() (--batch-norm frozen), use GroupNorm, or pass the whole batch at "
            "once with `chunk_size=0`"
        )
