"""A rank loss as a loss of pytorch-metric-learning, for its miners, reducers and wrappers.

    from rankgrad.integrations.pytorch_metric_learning import pml

    loss = pml(rg.SmoothAPLoss())
    loss(embeddings, labels)
    loss(embeddings, labels, miner(embeddings, labels))       # rank only the pairs that a miner selected
    DistributedLossWrapper(loss)

Install pytorch-metric-learning 2.9 or later: pip install 'rankgrad[pytorch-metric-learning]'.
"""

import copy
from typing import Any

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor, nn

import rankgrad as rg


class RankMetricLoss(BaseMetricLossFunction):
    """`loss` with the interface of `BaseMetricLossFunction`; make one with `pml`.

    The reducer sees one element per query that has a relevant candidate. A miner's `indices_tuple` selects pairs: a query then
    ranks only the candidates it was paired with, and only its positive pairs are relevant.
    """

    def __init__(self, loss: rg.RankLoss, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss = copy.copy(loss)
        self.loss.reduction = "none"

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor
    ) -> dict[str, Any]:
        if labels is None:
            raise ValueError("pml: labels are required; use rg.RankLoss.from_scores for relevance that is not a class label")
        in_batch = ref_emb is embeddings
        if indices_tuple is not None:
            losses, counted = self._mined(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        else:
            losses = self.loss(embeddings, labels) if in_batch else self.loss(embeddings, labels, ref_emb, ref_labels)
            same = (labels[:, None] == ref_labels).sum(dim=1)
            counted = same > int(in_batch)
        indices = counted.nonzero().view(-1)
        if not len(indices):
            return self.zero_losses()  # type: ignore[no-any-return]
        return {"loss": {"losses": losses[indices], "indices": indices, "reduction_type": "element"}}

    def _mined(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        anchor, positive, other_anchor, negative = convert_to_pairs(indices_tuple, labels, ref_labels)
        relevant = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
        relevant[anchor, positive] = True
        ranked = relevant.clone()
        ranked[other_anchor, negative] = True
        if self.loss.normalize:
            embeddings, ref_emb = nn.functional.normalize(embeddings), nn.functional.normalize(ref_emb)
        losses = self.loss.from_scores(embeddings @ ref_emb.t(), relevant, candidates=ranked)
        return losses, relevant.any(dim=1)


def pml(loss: rg.RankLoss, **kwargs: Any) -> RankMetricLoss:
    """`loss` as a loss of pytorch-metric-learning.

    Args:
        loss: a rank loss. For a memory of past batches use `rg.EmbeddingMemory`, not `CrossBatchMemory`.
        **kwargs: passed to `BaseMetricLossFunction`: `reducer`, `embedding_regularizer`, ...
    """
    if not isinstance(loss, rg.RankLoss):
        raise TypeError(f"pml: loss must be a rank loss such as rg.SmoothAPLoss(), got {type(loss).__name__}")
    return RankMetricLoss(loss, **kwargs)
