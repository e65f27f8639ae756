"""Rank losses, a batch sampler and an evaluator for sentence-transformers.

    from rankgrad.integrations.sentence_transformers import RankLoss, RetrievalEvaluator, class_balanced

    trainer = SentenceTransformerTrainer(
        model,
        args=SentenceTransformerTrainingArguments("out", batch_sampler=class_balanced(per_class=4)),
        train_dataset=dataset,                                # columns: text, label
        loss=RankLoss(model, rg.RecallAtKLoss()),
        evaluator=RetrievalEvaluator(texts, labels, name="test"),
    )

Install sentence-transformers 6 or later: pip install 'rankgrad[sentence-transformers]'.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation.evaluator import BaseEvaluator
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch import Tensor, nn

import rankgrad as rg
from rankgrad._citations import citations_of
from rankgrad.data.samplers import ClassBalanced


class RankLoss(nn.Module):
    """A rank loss in the form that `SentenceTransformerTrainer` expects.

    The columns of the dataset say what is relevant:

    | columns                          | label          | a query ranks                           | relevant           |
    | -------------------------------- | -------------- | --------------------------------------- | ------------------ |
    | text                             | class, [B]     | the other texts of the batch            | texts of its class |
    | anchor, positive, negatives ...  | none           | the positives and negatives of all rows | its own positive   |
    | query, document 1 ... document n | grades, [B, n] | the documents of its row                | documents above 0  |

    Args:
        model: the `SentenceTransformer` being trained.
        loss: any rank loss, also inside `SiMix`, `EmbeddingMemory` or `DistributedRankLoss`; `RecallAtKLoss()` by default.
            Pairs and graded lists need a plain `rg.RankLoss`.
        symmetric: for pairs, average with the loss of positives as queries against all anchors.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module | None = None, *, symmetric: bool = False) -> None:
        super().__init__()
        self.model = model  # the trainer replaces the attribute of this name by the wrapped model
        self.loss = rg.RecallAtKLoss() if loss is None else loss
        self.symmetric = symmetric

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Loss of one embedding matrix per column."""
        first, *others = embeddings
        if not others:
            if labels is None:
                raise ValueError(f"{self._name}: a single text column needs a label column with integer classes")
            return self._loss_of(first, labels)
        if labels is None:
            return self._pair_loss(first, others)
        if labels.ndim == 2 and labels.shape[1] == len(others):
            return self._graded_loss(first, others, labels)
        raise ValueError(
            f"{self._name}: with {len(embeddings)} text columns the label column must hold a list of {len(others)} per row, a "
            f"grade for each document, got labels of shape {list(labels.shape)}; remove the label column to train on (anchor, "
            "positive) pairs"
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {"loss": repr(self.loss), "symmetric": self.symmetric}

    @property
    def citation(self) -> str:
        """BibTeX of the papers behind the loss, for the model card."""
        return citations_of()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _loss_of(self, *arguments: Tensor) -> Tensor:
        value: Tensor = self.loss(*arguments)
        return value

    def _plain(self, use: str) -> rg.RankLoss:
        if not isinstance(self.loss, rg.RankLoss):
            raise TypeError(
                f"{self._name}: {use} need a plain rank loss such as rg.SmoothAPLoss(), got {type(self.loss).__name__}"
            )
        return self.loss

    def _pair_loss(self, anchors: Tensor, others: list[Tensor]) -> Tensor:
        self._plain("(anchor, positive) pairs")
        rows = len(anchors)
        pair = torch.arange(rows, device=anchors.device)
        # a negative is relevant to no anchor: it has a number that no anchor has
        number = torch.arange(rows * len(others), device=anchors.device)
        value = self._loss_of(anchors, pair, torch.cat(others), number)
        if not self.symmetric:
            return value
        return (value + self._loss_of(others[0], pair, anchors, pair)) / 2

    def _graded_loss(self, queries: Tensor, documents: list[Tensor], grades: Tensor) -> Tensor:
        loss = self._plain("graded lists")
        listed = torch.stack(documents, dim=1)
        if loss.normalize:
            queries, listed = nn.functional.normalize(queries, dim=-1), nn.functional.normalize(listed, dim=-1)
        return loss.from_scores((listed @ queries[:, :, None]).squeeze(2), grades)


class CachedRankLoss(CachedLossMixin, RankLoss):
    """`RankLoss` of a large batch with the memory of `mini_batch_size` texts; value and gradient are those of the whole batch.

    Args:
        model: the `SentenceTransformer` being trained.
        loss: as for `RankLoss`.
        symmetric: as for `RankLoss`.
        mini_batch_size: texts per forward pass.
        mini_batch_num_tokens: tokens per forward pass instead.
        show_progress_bar: show the progress over mini-batches.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        loss: nn.Module | None = None,
        *,
        symmetric: bool = False,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
    ) -> None:
        RankLoss.__init__(self, model, loss, symmetric=symmetric)
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        value: Tensor = CachedLossMixin.forward_cached(self, sentence_features, labels)
        return value

    def calculate_loss(self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False) -> Tensor:
        value = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if not with_backward:
            return value
        value.backward()
        return value.detach()

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}


def class_balanced(per_class: int = 4) -> Callable[..., DefaultBatchSampler]:
    """A `batch_sampler` for the training arguments: `per_class` texts of each class in a batch, no text twice in an epoch."""
    # checkpoints pickle the training arguments, so it cannot be a function inside this one
    return partial(_class_balanced_sampler, per_class=per_class)


def _class_balanced_sampler(
    dataset: Any,
    batch_size: int,
    drop_last: bool,
    valid_label_columns: Sequence[str] | None = None,
    generator: torch.Generator | None = None,
    seed: int = 0,
    *,
    per_class: int,
) -> DefaultBatchSampler:
    columns = list(valid_label_columns or ())
    return _ClassBalanced(dataset, batch_size, drop_last, columns, generator, seed, per_class=per_class)


class _ClassBalanced(DefaultBatchSampler):
    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, columns: list[str], *rest: Any, per_class: int) -> None:
        super().__init__(dataset, batch_size, drop_last, columns, *rest)
        column = next((name for name in columns if name in dataset.column_names), None)
        if column is None:
            wanted = ", ".join(map(repr, columns))
            raise ValueError(
                f"class_balanced: the dataset must have a label column, one of {wanted}, got {dataset.column_names}"
            )
        classes = {value: number for number, value in enumerate(dict.fromkeys(dataset[column]))}
        self._balanced = ClassBalanced([classes[value] for value in dataset[column]], batch_size, per_class, seed=self.seed)

    def __iter__(self) -> Iterator[list[int]]:
        self._balanced.set_epoch(self.epoch)
        return iter(self._balanced)

    def __len__(self) -> int:
        return len(self._balanced)


class RetrievalEvaluator(BaseEvaluator):
    """Full-list retrieval metrics of labelled texts by `rg.evaluate`, each against the others or a gallery.

    Args:
        texts: the queries.
        labels: their classes, integers or names.
        ref_texts: gallery texts; the queries themselves by default.
        ref_labels: classes of the gallery.
        name: prefix of the metrics.
        primary_metric: what selects the best checkpoint.
        batch_size: texts per forward pass.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[int] | Sequence[str],
        ref_texts: Sequence[str] | None = None,
        ref_labels: Sequence[int] | Sequence[str] | None = None,
        *,
        name: str = "",
        primary_metric: str = "mAP",
        batch_size: int = 64,
    ) -> None:
        super().__init__()
        if len(texts) != len(labels):
            raise ValueError(
                f"RetrievalEvaluator: texts and labels must be of equal length, got {len(texts)} and {len(labels)}"
            )
        if (ref_texts is None) != (ref_labels is None) or (
            ref_texts is not None and ref_labels is not None and len(ref_texts) != len(ref_labels)
        ):
            raise ValueError("RetrievalEvaluator: give both ref_texts and ref_labels, of equal length, or neither")
        self.texts, self.labels = list(texts), np.asarray(labels)
        self.ref_texts = None if ref_texts is None else list(ref_texts)
        self.ref_labels = None if ref_labels is None else np.asarray(ref_labels)
        self.name, self.primary_metric, self.batch_size = name, primary_metric, batch_size

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        embeddings = self._embed(model, self.texts)
        gallery = None if self.ref_texts is None else self._embed(model, self.ref_texts)
        result = rg.evaluate(embeddings, self.labels, gallery, self.ref_labels)
        metrics: dict[str, float] = self.prefix_name_to_metrics(dict(result), self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def _embed(self, model: SentenceTransformer, texts: list[str]) -> Tensor:
        found: Tensor = model.encode(texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
        return found.float().cpu()
