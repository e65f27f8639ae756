"""A network's pass over a batch as two CUDA graphs: small networks otherwise wait for the host to launch their layers."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad._device import forget_failed_capture


class GraphedModel:
    """Replaces the training pass of `model` over batches of one shape by graphs, from the second step on.

    A graph has one set of activations, so the whole batch must go through at once. A network that cannot be recorded runs as
    usual.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        self.model, self.autocast = model, autocast
        self._before = vars(model).get("forward")  # a pass that somebody else put in the place of the class's
        self._steps = 0

    def before_step(self, images: Any, *, whole: bool) -> str | None:
        """Records the graphs when it is time; what went wrong, where something did. `whole`: the batch is one chunk."""
        self._steps += 1
        if self._steps != 2 or not whole or not isinstance(images, Tensor) or not images.is_cuda:
            return None
        # recording runs the network a few times, and batch statistics among others would count these passes
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            self._record(images)
        # a layer that waits for the device, no memory for a second set of activations, or hooks, which torch asserts away
        except (RuntimeError, AssertionError) as error:
            self.release()
            forget_failed_capture(images.device)
            return str(error).partition("\n")[0]
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return None

    def release(self) -> None:
        """The network runs as usual again."""
        if self._before is None:
            vars(self.model).pop("forward", None)
        else:
            self.model.forward = self._before

    def _record(self, images: Tensor) -> None:
        plain, shape, dtype = self.model.forward, images.shape, images.dtype
        torch.clear_autocast_cache()
        # weights are cast inside the graph: a cast that was made outside would never be made again
        region = torch.autocast("cuda", dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        with region, torch.enable_grad(), warnings.catch_warnings():
            # recording happens on a stream of its own, by design
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
            torch.cuda.make_graphed_callables(self.model, (images.clone(),), allow_unused_input=True)
        replayed = self.model.forward

        def forward(batch: Tensor) -> Any:
            alike = batch.shape == shape and batch.dtype == dtype and batch.is_cuda
            return replayed(batch) if alike and torch.is_grad_enabled() and self.model.training else plain(batch)

        self.model.forward = forward
