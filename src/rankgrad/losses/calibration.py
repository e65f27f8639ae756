"""A rank loss with a second term around it. A rank loss knows the order of scores; such a term settles their size.

CalibratedRankLoss   (1 - weight) * rank loss + weight * term, for any term of embeddings and labels
ProxySoftmax         the term of SupRank: a classifier whose weights, one proxy per class, are trained along
ProxyAnchor          the same proxies with the loss of Proxy-Anchor
PairCalibration      the term of ROADMAP: margins for the scores themselves
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad._checks import check_count, check_embeddings, check_labels, check_not_negative, check_positive
from rankgrad._device import autocast_disabled
from rankgrad.losses.memory import EmbeddingMemory
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.simix import SiMix
from rankgrad.ops.relevance import Relevance

# what cross_entropy leaves out
NO_PROXY = -100


class CalibratedRankLoss(nn.Module):
    """(1 - weight) * `loss` + weight * `term`, as ROADMAP and SupRank train.

        term = rg.ProxySoftmax(classes=range(98), dim=512)
        loss = rg.CalibratedRankLoss(rg.SupAPLoss(), term, weight=0.1)
        optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": loss.parameters(), "lr": 1e-2}], lr=1e-4)

    Args:
        loss: a `RankLoss` with reduction "mean", a `SiMix` or an `EmbeddingMemory`.
        term: any function of embeddings [N, d] and labels [N] with one value, such as a loss of pytorch-metric-learning. It
            sees the embeddings of the batch, without virtual examples or past batches. Train its parameters too.
        weight: of the term, within 0 and 1.
    """

    def __init__(
        self, loss: RankLoss | SiMix | EmbeddingMemory, term: Callable[[Tensor, Tensor], Tensor], weight: float = 0.1
    ) -> None:
        super().__init__()
        caller = type(self).__name__
        if not isinstance(loss, (RankLoss, SiMix, EmbeddingMemory)):
            raise TypeError(f"{caller}: loss must be a RankLoss, SiMix or EmbeddingMemory, got {type(loss).__name__}")
        if not callable(term) or isinstance(term, type):
            raise TypeError(
                f"{caller}: term must be a function of embeddings and labels such as ProxySoftmax(...), got {term!r}"
            )
        check_not_negative(weight, name="weight", caller=caller)
        if weight > 1:
            raise ValueError(f"{caller}: weight must be within 0 and 1, got {weight!r}")
        if (loss if isinstance(loss, RankLoss) else loss.loss).reduction != "mean":
            raise ValueError(f"{caller}: loss must have reduction 'mean', got 'none'")
        self.loss, self.term, self.weight = loss, term, weight

    @property
    def used_queries(self) -> Tensor:
        return self.loss.used_queries

    def clear_graphs(self) -> None:
        """See `RankLoss.clear_graphs`."""
        self.loss.clear_graphs()

    def prepare_labels(self, labels: Any) -> None:
        """See `RankLoss.prepare_labels`."""
        if isinstance(self.loss, RankLoss):
            self.loss.prepare_labels(labels)

    def forward(self, embeddings: Tensor, labels: Tensor, *, relevance: Relevance | None = None, **options: Any) -> Tensor:
        """Both terms of a batch; the rank loss takes `relevance` in place of the labels, and `options`."""
        value: Tensor = self.loss(embeddings, labels if relevance is None else relevance, **options)
        return self.with_term(value, embeddings, labels)

    def with_term(self, value: Tensor, embeddings: Tensor, labels: Any, *, share: float = 1.0) -> Tensor:
        """The sum of the rank loss `value`, which may be that of a shard, and `share` of the term of the whole batch."""
        return (1 - self.weight) * value + (self.weight * share) * self.term(embeddings, labels).to(value.dtype)


class ClassProxies(nn.Module):
    """One trained vector for each class, and the cosines of embeddings with all of them: what terms over proxies share.

    Proxies are normalised like embeddings. Give them a learning rate of their own, larger than that of a pretrained network. An
    item whose label is not in `classes`, a distractor for instance, has no proxy and is left out; if no item of a batch has one
    the value is NaN.

    Args:
        classes: labels of the training set, or their number, for labels 0, 1, ... Row i of `proxies` belongs to the i-th label
            in ascending order.
        dim: dimensions of an embedding.
    """

    classes: Tensor

    def __init__(self, classes: int | Sequence[int] | Tensor, dim: int) -> None:
        super().__init__()
        caller = type(self).__name__
        if isinstance(classes, int):
            check_count(classes, name="classes", caller=caller)
            classes = range(classes)
        labels = torch.as_tensor(classes if isinstance(classes, Tensor) else list(classes), device="cpu")
        if labels.ndim != 1 or not len(labels) or labels.is_floating_point() or len(labels.unique()) != len(labels):
            raise ValueError(f"{caller}: classes must be their number, or different integer labels, got {classes!r}")
        check_count(dim, name="dim", caller=caller)
        self.register_buffer("classes", labels.long().sort().values, persistent=False)
        self.proxies = nn.Parameter(torch.empty(len(labels), dim).uniform_(-(dim**-0.5), dim**-0.5))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        caller = type(self).__name__
        check_embeddings(embeddings, name="embeddings", caller=caller)
        check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller=caller)
        if embeddings.shape[1] != self.proxies.shape[1]:
            wanted = self.proxies.shape[1]
            raise ValueError(
                f"{caller}: embeddings must have the {wanted} dimensions of the proxies, got {embeddings.shape[1]}"
            )
        labels = labels.to(self.classes.device, torch.long)
        index = torch.searchsorted(self.classes, labels).clamp_(max=len(self.classes) - 1)
        target = torch.where(self.classes[index] == labels, index, NO_PROXY)
        with autocast_disabled(embeddings.device):
            wide = _wide(embeddings)
            cosines = F.normalize(wide, dim=1) @ F.normalize(self.proxies.to(wide), dim=1).t()
            return self._value(cosines, target.to(cosines.device))

    def _value(self, cosines: Tensor, target: Tensor) -> Tensor:
        """The term of cosines [N, classes]; `target` is the class of each item, or `NO_PROXY`."""
        raise NotImplementedError


class ProxySoftmax(ClassProxies):
    """Cross-entropy of softmax(cosines with class proxies / temperature) (Zhai and Wu, 2019), the second term of SupRank.

    Args:
        classes: see `ClassProxies`.
        dim: dimensions of an embedding.
        temperature: of the softmax.
    """

    def __init__(self, classes: int | Sequence[int] | Tensor, dim: int, temperature: float = 0.05) -> None:
        super().__init__(classes, dim)
        check_positive(temperature, name="temperature", caller="ProxySoftmax")
        self.temperature = temperature

    def extra_repr(self) -> str:
        return f"classes={len(self.classes)}, dim={self.proxies.shape[1]}, temperature={self.temperature}"

    def _value(self, cosines: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(cosines / self.temperature, target, ignore_index=NO_PROXY)


class ProxyAnchor(ClassProxies):
    """Proxy-Anchor (Kim et al., 2020) as a second term: every proxy attracts its class and repels all others of the batch.

    The mean over classes in the batch of log(1 + sum exp(-alpha (cosine - margin))) over a class's own items, and over all
    classes of log(1 + sum exp(alpha (cosine + margin))) over the others.

    Args:
        classes: see `ClassProxies`.
        dim: dimensions of an embedding.
        margin: of cosines.
        alpha: how much the hardest items count: the inverse of a temperature.
    """

    def __init__(self, classes: int | Sequence[int] | Tensor, dim: int, margin: float = 0.1, alpha: float = 32.0) -> None:
        super().__init__(classes, dim)
        check_not_negative(margin, name="margin", caller="ProxyAnchor")
        check_positive(alpha, name="alpha", caller="ProxyAnchor")
        self.margin, self.alpha = margin, alpha
        # as the paper begins: longer, and so slower to turn
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def extra_repr(self) -> str:
        return f"classes={len(self.classes)}, dim={self.proxies.shape[1]}, margin={self.margin}, alpha={self.alpha}"

    def _value(self, cosines: Tensor, target: Tensor) -> Tensor:
        own = target[:, None] == torch.arange(cosines.shape[1], device=target.device)
        others = ~own & (target != NO_PROXY)[:, None]
        attracts = _log_one_plus_sum(self.alpha * (self.margin - cosines), own)
        repels = _log_one_plus_sum(self.alpha * (self.margin + cosines), others)
        return attracts.sum() / own.any(dim=0).sum() + repels.mean()


class PairCalibration(nn.Module):
    """Margins for cosines (ROADMAP): relevant ones below `alpha` and irrelevant ones above `beta` cost their distance.

    The mean over queries of the mean over their relevant and the mean over their irrelevant items. It stores all scores of the
    batch at once.
    """

    def __init__(self, alpha: float = 0.9, beta: float = 0.6) -> None:
        super().__init__()
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not -1 <= value <= 1:
                raise ValueError(f"PairCalibration: {name} must be a cosine within -1 and 1, got {value!r}")
        self.alpha, self.beta = alpha, beta

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}"

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        check_embeddings(embeddings, name="embeddings", caller="PairCalibration")
        check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller="PairCalibration")
        labels = labels.to(embeddings.device)
        with autocast_disabled(embeddings.device):
            unit = F.normalize(_wide(embeddings), dim=1)
            scores, same = unit @ unit.t(), labels[:, None] == labels
            relevant = same & ~torch.eye(len(labels), dtype=torch.bool, device=same.device)
            return (_mean((self.alpha - scores).relu(), relevant) + _mean((scores - self.beta).relu(), ~same)).mean()


def _log_one_plus_sum(exponents: Tensor, mask: Tensor) -> Tensor:
    """[C] log(1 + sum exp) of each column over where `mask` holds."""
    kept = exponents.masked_fill(~mask, -torch.inf)
    return torch.cat((kept.new_zeros(1, kept.shape[1]), kept)).logsumexp(dim=0)


def _wide(embeddings: Tensor) -> Tensor:
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """[N] of each row over where `mask` holds; 0 where it holds nowhere."""
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
