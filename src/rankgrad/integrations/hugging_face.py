"""Rank losses in `transformers.Trainer`.

    trainer = Trainer(model, args, train_dataset=dataset, compute_loss_func=compute_loss_func(rg.RecallAtKLoss()))

Install transformers: pip install 'rankgrad[hugging-face]'.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

EMBEDDING_FIELDS = ("embeddings", "sentence_embedding", "pooler_output", "image_embeds", "text_embeds")


class compute_loss_func:  # noqa: N801  named like the Trainer's argument
    """A rank loss as the `compute_loss_func` of `transformers.Trainer`.

    Each process ranks its own batch. Wrap the loss in `rg.DistributedRankLoss` to rank the batches of all processes together.

    Args:
        loss: any loss of (embeddings, labels).
        field: field of the model's output that holds the embeddings [B, d]; by default the first of "embeddings",
            "sentence_embedding", "pooler_output", "image_embeds", "text_embeds".
    """

    def __init__(self, loss: nn.Module, field: str | None = None) -> None:
        self.loss, self.field = loss, field

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value: Tensor = self.loss(self._embeddings(outputs), labels)
        # the trainer sums over accumulated batches and leaves the mean, over the items of all of them, to the loss
        return value if num_items_in_batch is None else value * (len(labels) / num_items_in_batch)

    def _embeddings(self, outputs: Any) -> Tensor:
        if isinstance(outputs, Tensor):
            return outputs
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "compute_loss_func: the model must return a tensor or a mapping with the embeddings, "
                f"got {type(outputs).__name__}"
            )
        fields = EMBEDDING_FIELDS if self.field is None else (self.field,)
        for name in fields:
            if isinstance(outputs.get(name), Tensor):
                found: Tensor = outputs[name]
                return found
        raise ValueError(
            f"compute_loss_func: the model's output must have one of {', '.join(fields)}, got {', '.join(outputs)}; "
            "name the field that holds the embeddings with field="
        )
