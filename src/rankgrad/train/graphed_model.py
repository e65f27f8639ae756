"""A model's training passes over chunks of one shape as CUDA graphs: the host then starts one graph instead of every layer.

Chunks that keep their activations from the first pass have a forward and a backward graph each. All others share two graphs: a
forward pass without gradients, and the pass that repeats it and goes back. Backward graphs add to buffers that become the
gradients of the parameters, so a chunk costs the host a few launches; those of a batch in one chunk are what its graph writes.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rankgrad._device import autocast_disabled, forget_failed_capture, no_garbage_collection
from rankgrad.train.errors import is_out_of_memory
from rankgrad.train.snapshot import BufferSnapshot

Replay: TypeAlias = Callable[[], None]

# passes before a capture: libraries choose algorithms and allocate workspaces, kernels are loaded
WARM_UP = 3
# what may go on beside a capture: first anything in other threads, such as a loader that pins memory, then anything at all
MODES = ("thread_local", "relaxed")


class Recorder(Protocol):
    """Makes replays of functions; `CudaRecorder`, or a stand-in where there is no GPU."""

    def warm_up(self, call: Callable[[], object]) -> None: ...

    def record(self, call: Callable[[], object]) -> Replay: ...


class CudaRecorder:
    """Captures functions as CUDA graphs in one memory pool; they must be replayed in the order of their capture.

    Args:
        device: a GPU.
        mode: capture error mode, see `torch.cuda.graph`.
    """

    def __init__(self, device: torch.device, mode: str) -> None:
        self.mode, self.stream, self.pool = mode, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()

    def record(self, call: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode=self.mode):
            call()
        replay: Replay = graph.replay
        return replay


class _Pass:
    """Static tensors of one pass, and its replays."""

    output: Tensor
    gradient: Tensor
    forward: Replay
    backward: Replay

    def __init__(self, images: Tensor) -> None:
        self.images = images.clone()


class GraphedModel:
    """Graphs of a model's passes over chunks; empty until `record` has succeeded.

    Args:
        model: in training mode.
        autocast: dtype of the autocast region around the model, None for none.
        make_recorder: from a device and a capture error mode.
    """

    def __init__(
        self,
        model: nn.Module,
        autocast: torch.dtype | None,
        make_recorder: Callable[[torch.device, str], Recorder] = CudaRecorder,
    ) -> None:
        self.model, self.autocast, self.make_recorder = model, autocast, make_recorder
        self.release()

    def release(self) -> None:
        """Drops all graphs and their memory."""
        self._kept: list[_Pass] = []
        self._embed: _Pass | None = None
        self._repeat: _Pass | None = None
        self._parameters: list[nn.Parameter] = []
        self._sums: list[Tensor | None] = []
        self._sums_are_written = False
        self._has_gradients = False
        self._signature: Any = None

    @property
    def num_kept(self) -> int:
        """Number of chunks, from the first one on, that keep their activations."""
        return len(self._kept)

    def accepts(self, chunk: Tensor, index: int) -> bool:
        """Whether there are graphs for chunk `index` of a batch."""
        alike = self._signature is not None and _signature(chunk) == self._signature
        return alike and self.model.training and (index < self.num_kept or self._embed is not None)

    def record(self, chunk: Tensor, *, kept: int, others: bool) -> str | None:
        """Records the passes; returns the reason where that failed, and the model then runs layer by layer.

        Args:
            chunk: images of one chunk, on the device.
            kept: number of chunks that keep their activations.
            others: whether there are chunks besides these.

        Raises:
            torch.OutOfMemoryError: memory does not suffice for that many chunks.
        """
        if any(vars(self.model).get(name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
            return "the model has hooks, which a graph would skip"
        # recording runs the model, and batch statistics must not count these passes
        buffers = BufferSnapshot.of(self.model)
        reason: str | None = None
        for mode in MODES:
            reason = self._try_to_record(chunk, kept, others, mode)
            buffers.restore()
            if reason is None:
                break
        return reason

    def _try_to_record(self, chunk: Tensor, kept: int, others: bool, mode: str) -> str | None:
        try:
            with no_garbage_collection():
                self._record(chunk, kept, others, self.make_recorder(chunk.device, mode))
        except (RuntimeError, AssertionError) as error:
            self.release()
            if chunk.is_cuda:
                forget_failed_capture(chunk.device)
            first = _first_error(error)
            if is_out_of_memory(first):
                raise torch.OutOfMemoryError(str(first)) from None
            return str(first).partition("\n")[0]
        return None

    def _record(self, chunk: Tensor, kept: int, others: bool, recorder: Recorder) -> None:
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._sums_are_written = kept == 1 and not others
        torch.clear_autocast_cache()
        with torch.enable_grad(), autocast_disabled(chunk.device), warnings.catch_warnings():
            # recording happens on a stream of its own, by design
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
            gradient = self._warm_up(_Pass(chunk), recorder)
            self._kept = [_Pass(chunk) for _ in range(kept)]
            for each in self._kept:
                each.gradient = gradient.clone()
                each.forward = recorder.record(lambda each=each: self._run_forward(each))  # type: ignore[misc]
            # between the kept chunks' forward and backward graphs, as in a step: their activations are not overwritten
            if others:
                self._embed = embed = _Pass(chunk)
                recorder.warm_up(lambda: self._run_embed(embed))
                embed.forward = recorder.record(lambda: self._run_embed(embed))
            for each in self._kept:
                each.backward = recorder.record(lambda each=each: self._run_backward(each))  # type: ignore[misc]
            if others:
                self._repeat = repeat = _Pass(chunk)
                repeat.gradient = gradient.clone()
                repeat.backward = recorder.record(lambda: self._run_both(repeat))
        self._signature = _signature(chunk)

    def _warm_up(self, trial: _Pass, recorder: Recorder) -> Tensor:
        """Runs forward and backward passes, prepares sums for the parameters that get a gradient; a gradient of the output."""
        used: list[bool] = []

        def run() -> None:
            self._run_forward(trial)
            ones = torch.ones_like(trial.output)
            gradients = torch.autograd.grad(trial.output, self._parameters, ones, allow_unused=True)
            used[:] = [gradient is not None for gradient in gradients]

        recorder.warm_up(run)
        self._sums = [torch.zeros_like(p) if is_used else None for p, is_used in zip(self._parameters, used, strict=True)]
        return torch.zeros_like(trial.output, requires_grad=False)

    def _run_forward(self, each: _Pass) -> None:
        # weights are cast inside the graph: a cast that was made outside would never be made again
        device = each.images.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            each.output = self.model(each.images)

    @torch.no_grad()
    def _run_embed(self, each: _Pass) -> None:
        self._run_forward(each)

    def _run_backward(self, each: _Pass) -> None:
        gradients = torch.autograd.grad(each.output, self._parameters, each.gradient, allow_unused=True)
        if self._sums_are_written:
            self._sums = _laid_out(gradients, self._parameters, each.gradient)
            return
        pairs = [(total, gradient) for total, gradient in zip(self._sums, gradients, strict=True) if total is not None]
        torch._foreach_add_([total for total, _ in pairs], [gradient for _, gradient in pairs])

    def _run_both(self, each: _Pass) -> None:
        self._run_forward(each)
        self._run_backward(each)

    def begin_step(self) -> None:
        """Resets the gradients; those that parameters still have from the last step are kept for them.

        Call it before the first forward pass, which may use their memory for activations.
        """
        self._has_gradients = False
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None and parameter.grad is total:
                parameter.grad = total.clone()
        if not self._sums_are_written:
            torch._foreach_zero_([total for total in self._sums if total is not None])

    def forward_kept(self, index: int, chunk: Tensor) -> Tensor:
        """Embeddings of chunk `index`, which keeps its activations; valid until its next pass."""
        each = self._kept[index]
        each.images.copy_(chunk, non_blocking=True)
        each.forward()
        return each.output.detach()

    def backward_kept(self, index: int, gradient: Tensor) -> None:
        """The backward pass of chunk `index`."""
        each = self._kept[index]
        each.gradient.copy_(gradient)
        each.backward()
        self._has_gradients = True

    def forward(self, chunk: Tensor) -> Tensor:
        """Embeddings of any chunk, without activations."""
        assert self._embed is not None
        self._embed.images.copy_(chunk, non_blocking=True)
        self._embed.forward()
        return self._embed.output.clone()

    def repeat(self, chunk: Tensor, gradient: Tensor) -> None:
        """The forward pass of a chunk once more, and its backward pass."""
        assert self._repeat is not None
        self._repeat.images.copy_(chunk, non_blocking=True)
        self._repeat.gradient.copy_(gradient)
        self._repeat.backward()
        self._has_gradients = True

    def end_step(self) -> None:
        """Adds the gradients of all backward passes since `begin_step` to those of the parameters."""
        if not self._has_gradients:
            return
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                parameter.grad = total if parameter.grad is None else parameter.grad + total


def _laid_out(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], given: Tensor) -> list[Tensor | None]:
    """Gradients with the strides of their parameters, as optimizers want them, and each in memory of its own.

    Args:
        gradients: of a backward pass.
        parameters: whose gradients they are.
        given: the gradient of the output, which may come through unchanged.
    """
    used, found = {given.untyped_storage().data_ptr()}, list[Tensor | None]()
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            found.append(None)
            continue
        alike = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
        if not alike or gradient.untyped_storage().data_ptr() in used:
            gradient = torch.empty_like(parameter).copy_(gradient)  # noqa: PLW2901
        used.add(gradient.untyped_storage().data_ptr())
        found.append(gradient)
    return found


def _signature(chunk: Tensor) -> Any:
    return chunk.shape, chunk.dtype


def _first_error(error: BaseException) -> BaseException:
    """What ended a capture; ending it then fails too, with a message that says no more than that."""
    while error.__context__ is not None:
        error = error.__context__
    return error
