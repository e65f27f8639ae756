"""A network's pass over a batch as two CUDA graphs: small networks otherwise wait for the host to launch their layers."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.train.gradient_check import live_batch_norms


class GraphedPass:
    """Replaces the training pass of `model` over batches of one shape by graphs, from the second step on.

    A graph has one set of activations, so the whole batch must go through at once. Batch normalisation in training mode would
    count the passes that are made to record the graphs, so such networks run as usual, like those that cannot be recorded.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        self.model, self.autocast = model, autocast
        self._steps = 0

    def before_step(self, images: Any, *, whole: bool) -> str | None:
        """Records the graphs when it is time; what went wrong, where something did. `whole`: the batch is one chunk."""
        self._steps += 1
        if self._steps != 2 or not whole or not isinstance(images, Tensor) or not images.is_cuda:
            return None
        if live_batch_norms(self.model):
            return None
        try:
            self._record(images)
        except RuntimeError as error:  # a layer that waits for the device, or no memory for a second set of activations
            self.give_up()
            torch.cuda.synchronize(images.device)
            return str(error).partition("\n")[0]
        return None

    def give_up(self) -> None:
        """The network runs as usual again."""
        vars(self.model).pop("forward", None)

    def _record(self, images: Tensor) -> None:
        plain, shape, dtype = self.model.forward, images.shape, images.dtype
        torch.clear_autocast_cache()
        # weights are cast inside the graph: a cast that was made outside would never be made again
        region = torch.autocast("cuda", dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        with region, warnings.catch_warnings():
            # recording happens on a stream of its own, by design
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
            torch.cuda.make_graphed_callables(self.model, (images.clone(),), allow_unused_input=True)
        replayed = self.model.forward

        def forward(batch: Tensor) -> Any:
            alike = batch.shape == shape and batch.dtype == dtype and batch.is_cuda
            return replayed(batch) if alike and torch.is_grad_enabled() and self.model.training else plain(batch)

        self.model.forward = forward
