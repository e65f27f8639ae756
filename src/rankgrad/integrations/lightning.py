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
from rankgrad._messages import did_you_mean
from rankgrad.losses.distributed import gather_ragged


class RetrievalMetrics(Callback):
    """Collects what `validation_step` and `test_step` return and logs the metrics of `rg.evaluate` at the end of the epoch.

    A step returns a dictionary with "embeddings" [B, d] and "labels" [B]. Each of several dataloaders is evaluated on its own,
    and its metrics end in "/dataloader_idx_0" and so on. With several processes the embeddings of all of them are evaluated
    together; duplicates that a distributed sampler adds count like other items. The sanity check before training, which sees
    too few batches to find anything, is not evaluated.

    Args:
        metrics: which metrics to log; all by default.
        prefix: of the logged names, by stage: "val_R@1", "test_R@1".

    Attributes:
        result: of the last evaluation, of the last dataloader.
    """

    def __init__(self, metrics: Sequence[str] | None = None, prefix: Mapping[str, str] | None = None) -> None:
        self.metrics = None if metrics is None else list(metrics)
        self.prefix = {"validate": "val_", "test": "test_"} if prefix is None else dict(prefix)
        self.result: rg.Result | None = None
        self._start()

    def _start(self) -> None:
        self._collected: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by dataloader

    def _add(self, outputs: Any, dataloader: int) -> None:
        if not isinstance(outputs, Mapping) or not {"embeddings", "labels"} <= set(outputs):
            got = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise TypeError(f"RetrievalMetrics: the step must return a dictionary with 'embeddings' and 'labels', got {got}")
        found = outputs["embeddings"].detach().float(), outputs["labels"].detach()
        self._collected.setdefault(dataloader, []).append(found)

    def _finish(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        collected = {} if trainer.sanity_checking else self._collected
        for dataloader, parts in collected.items():
            embeddings, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
            if trainer.world_size > 1:
                embeddings, labels = gather_ragged(embeddings, None), gather_ragged(labels, None)
            self.result = rg.evaluate(embeddings, labels)
            shown = list(self.result) if self.metrics is None else self.metrics
            if unknown := [name for name in shown if name not in self.result]:
                raise ValueError(
                    f"RetrievalMetrics: there is no metric {unknown[0]!r}: {did_you_mean(unknown[0], list(self.result))}"
                )
            end = f"/dataloader_idx_{dataloader}" if len(collected) > 1 else ""
            values = {f"{self.prefix[stage]}{name}{end}": self.result[name] for name in shown}
            module.log_dict(values, rank_zero_only=True, add_dataloader_idx=False)
        self._start()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add(outputs, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "validate")

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add(outputs, dataloader_idx)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test")
