"""pytorch-metric-learning: a rank loss as one of its losses, and its losses in our training.

    from rankgrad.integrations.pytorch_metric_learning import pml

    loss = pml(rg.SmoothAPLoss())
    loss(embeddings, labels)
    loss(embeddings, labels, miner(embeddings, labels))       # rank only the pairs that a miner selected
    DistributedLossWrapper(loss)

    rankgrad train --data DIR --loss pml:ProxyAnchorLoss --loss-args margin=0.1,alpha=32 --loss-lr 100

Install pytorch-metric-learning 2.9 or later: pip install 'rankgrad[pytorch-metric-learning]'.
"""

import ast
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor, nn

import rankgrad as rg
from rankgrad._device import autocast_disabled
from rankgrad._messages import did_you_mean


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
            ascending = ref_labels.sort().values
            same = torch.searchsorted(ascending, labels, right=True) - torch.searchsorted(ascending, labels)
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
    if kwargs.get("distance") is not None:
        raise TypeError(
            f"pml: a rank loss ranks by cosines, or by dot products with normalize=False, got distance={kwargs['distance']}"
        )
    return RankMetricLoss(loss, **kwargs)


class MetricLearningLoss(nn.Module):
    """A loss of pytorch-metric-learning by name, with a miner if wanted, as a function of embeddings and any integer labels.

    Args:
        name: of a class in `pytorch_metric_learning.losses`.
        arguments: of its constructor. `num_classes` and `embedding_size` are filled in where it takes them.
        classes: labels that training knows; proxies are numbered in their order.
        dim: dimensions of an embedding.
        miner: of a class in `pytorch_metric_learning.miners`, "" for none.
        miner_arguments: of its constructor.
    """

    classes: Tensor

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        classes: Sequence[int],
        dim: int,
        miner: str = "",
        miner_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        known = {"num_classes": len(classes), "embedding_size": dim}
        self.loss = _build(losses, "loss", name, arguments, known)
        self.miner = _build(miners, "miner", miner, miner_arguments or {}, {}) if miner else None
        self.register_buffer("classes", torch.tensor(sorted(classes)), persistent=False)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        numbers = torch.searchsorted(self.classes, labels.to(self.classes.device))
        with autocast_disabled(embeddings.device):
            embeddings = embeddings.float()
            pairs = None if self.miner is None else self.miner(embeddings, numbers)
            value: Tensor = self.loss(embeddings, numbers, pairs)
        return value


def parse_arguments(text: str, flag: str) -> dict[str, Any]:
    """Constructor arguments from `margin=0.1,alpha=32`, as `flag` gives them; values are Python literals or else text."""
    found: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, separator, value = part.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ValueError(f"{flag} must be of the form name=value,name=value, got {part!r}")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[name.strip()] = value.strip()
    return found


def _build(module: Any, kind: str, name: str, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> nn.Module:
    names = [each for each, value in vars(module).items() if inspect.isclass(value) and not each.startswith("Base")]
    if name not in names:
        raise ValueError(f"pytorch-metric-learning has no {kind} {name!r}: {did_you_mean(name, names)}")
    made = getattr(module, name)
    wanted = inspect.signature(made).parameters
    filled = {each: value for each, value in known.items() if each in wanted}
    try:
        built: nn.Module = made(**{**filled, **arguments})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name} of pytorch-metric-learning cannot be made: {error}") from error
    return built
