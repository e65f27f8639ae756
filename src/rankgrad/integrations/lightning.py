"""Retrieval metrics in Lightning: a callback that evaluates the embeddings of a whole validation epoch.

    class Model(LightningModule):
        def validation_step(self, batch, batch_idx):
            images, labels = batch
            return {"embeddings": self(images), "labels": labels}

    Trainer(callbacks=[RetrievalMetrics(), ModelCheckpoint(monitor="val_mAP", mode="max")])

Install Lightning: pip install 'rankgrad[lightning]'.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import rankgrad as rg


class RetrievalMetrics(Callback):
    """Collects what `validation_step` and `test_step` return and logs the metrics of `rg.evaluate` at the end of the epoch.

    A step returns a dictionary with "embeddings" [B, d] and "labels" [B]. With several processes the embeddings of all of them
    are evaluated together; duplicates that a distributed sampler adds count like other items.

    Args:
        metrics: which metrics to log; all by default.
        prefix: of the logged names, by stage: "val_R@1", "test_R@1".
    """

    def __init__(self, metrics: Sequence[str] | None = None, prefix: Mapping[str, str] | None = None) -> None:
        self.metrics = None if metrics is None else list(metrics)
        self.prefix = {"validate": "val_", "test": "test_"} if prefix is None else dict(prefix)
        self.result: rg.Result | None = None
        self._embeddings: list[Tensor] = []
        self._labels: list[Tensor] = []

    def _start(self) -> None:
        self._embeddings, self._labels = [], []

    def _add(self, outputs: Any) -> None:
        if not isinstance(outputs, Mapping) or not {"embeddings", "labels"} <= set(outputs):
            got = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise TypeError(f"RetrievalMetrics: the step must return a dictionary with 'embeddings' and 'labels', got {got}")
        self._embeddings.append(outputs["embeddings"].detach().float())
        self._labels.append(outputs["labels"].detach())

    def _finish(self, module: LightningModule, stage: str) -> None:
        if not self._embeddings:
            return
        embeddings, labels = torch.cat(self._embeddings), torch.cat(self._labels)
        if module.trainer.world_size > 1:
            embeddings = module.all_gather(embeddings).flatten(0, 1)
            labels = module.all_gather(labels).flatten(0, 1)
        self.result = rg.evaluate(embeddings, labels)
        shown = list(self.result) if self.metrics is None else self.metrics
        prefix = self.prefix[stage]
        module.log_dict({f"{prefix}{name}": self.result[name] for name in shown}, rank_zero_only=True)
        self._start()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any) -> None:
        self._add(outputs)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(pl_module, "validate")

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any) -> None:
        self._add(outputs)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(pl_module, "test")
