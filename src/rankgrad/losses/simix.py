"""SiMix (Patel et al., 2022): virtual examples between all pairs of one class, for any loss of this package."""

import copy

import torch
from torch import Tensor

from rankgrad._checks import check_embeddings, check_labels, check_weights
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.recall import RecallAtK, RecallAtKLoss
from rankgrad.ops.compiled import CompilableLoss
from rankgrad.ops.embedding_inputs import Mixture
from rankgrad.ops.labels import Labels
from rankgrad.ops.levels import Levels
from rankgrad.ops.relevance import Relevance, RelevanceInput, labels_or_relevance

PAPER_KS = (1, 2, 4, 8, 16)
PAPER_KS_WITH_SIMIX = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


class SiMix(CompilableLoss):
    """`loss` on the batch and on a virtual example alpha x + (1 - alpha) z for every pair x, z of one class (eq. 8-10).

    A virtual example has the class of its pair, is a query and a candidate like any other, and is not normalised again, so
    its scores are mixtures of scores. alpha ~ U(0, 1) is drawn for each from `generator` (torch's own if None).

    A class of m items becomes one of m + m (m - 1) / 2: 4 become 10. The lists and the number of queries grow with it, so
    the time of the loss grows with the square (6.25 times for m = 4). In plain torch memory stays O(items x dimensions):
    virtual embeddings are mixed tile by tile when they are needed, in forward and backward, and never stored; what is kept
    of each are two indices, its alpha and its ranks. The fused GPU kernels need them as float16 rows and their gradient in
    float32, so there a virtual example costs as much as an original.

    A `RecallAtKLoss` with the paper's k of 1, 2, 4, 8, 16 gets the paper's wider set for SiMix; any other set is kept.
    """

    def __init__(self, loss: RankLoss, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(loss, RankLoss):
            raise TypeError(f"SiMix: loss must be a RankLoss, got {type(loss).__name__}")
        if isinstance(loss, RecallAtKLoss) and isinstance(loss.objective, RecallAtK) and loss.objective.ks == PAPER_KS:
            tau = loss.objective.tau
            loss = copy.copy(loss)  # the caller's loss keeps its own cut-offs
            loss.objective = RecallAtK(PAPER_KS_WITH_SIMIX, tau)
        self.loss, self.generator = loss, generator

    @property
    def used_queries(self) -> Tensor:
        return self.loss.used_queries

    def clear_graphs(self) -> None:
        """See `RankLoss.clear_graphs`."""
        self.loss.clear_graphs()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance | None = None,
        *,
        relevance: Relevance | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Loss of embeddings [N, d] with labels [N], or with `Levels`, whose finest classes are mixed.

        A virtual example has the weight alpha w_x + (1 - alpha) w_z.
        """
        if torch.compiler.is_compiling():
            others = {"labels": labels, "relevance": relevance, "weights": weights}
            one_value = self.loss.reduction == "mean"
            return self.compiled_call("forward", {"embeddings": embeddings}, others, one_value=one_value)
        mixture, mixed = self._mixed(embeddings, labels_or_relevance(labels, relevance, "SiMix"), None)
        mixed_weights = self._mixed_weights(weights, mixture, len(embeddings))
        return self.loss.of_embeddings(embeddings, None, mixed, mixture=mixture, weights=mixed_weights)

    def shard_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance,
        rows: slice,
        alpha: Tensor,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """What a shard of the queries contributes to the loss of a batch, the same share as `rows` is of the originals.

        The shards of a batch sum up to its loss if all have the `alpha` of one `draw`.
        """
        mixture, relevance = self._mixed(embeddings, labels, alpha)
        shard = slice(*(edge * relevance.num_queries // len(embeddings) for edge in (rows.start, rows.stop)))
        mixed_weights = self._mixed_weights(weights, mixture, len(embeddings))
        return self.loss.of_embeddings(embeddings, None, relevance, mixture=mixture, weights=mixed_weights, shard=shard)

    def draw(self, labels: Tensor | Relevance, like: Tensor) -> Tensor:
        """The alpha of every virtual example of a batch, in the precision of scores of `like`, on its device."""
        return self._draw(len(same_class_pairs(self._classes(labels))[0]), like)

    def _classes(self, labels: Tensor | Relevance) -> Tensor:
        """[N] classes whose items are mixed."""
        if isinstance(labels, Levels):
            classes: Tensor = torch.unique(labels.labels, dim=0, return_inverse=True)[1]
            return classes
        if isinstance(labels, Relevance):
            came = type(labels).__name__
            raise TypeError(f"SiMix: virtual examples lie between items of one class, so labels must be classes, got {came}")
        return self.loss.relevance(labels).labels

    def _draw(self, pairs: int, like: Tensor) -> Tensor:
        device = like.device if self.generator is None else self.generator.device
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.rand(pairs, generator=self.generator, device=device, dtype=dtype).to(like.device)

    def _mixed_weights(self, weights: Tensor | None, mixture: Mixture, items: int) -> Tensor | None:
        if weights is None:
            return None
        check_weights(weights, items=items, validate=self.loss.validate, caller="SiMix")
        first, second, alpha = mixture
        weights = weights.to(alpha)
        return torch.lerp(weights[second], weights[first], alpha)

    def _mixed(self, embeddings: Tensor, labels: Tensor | Relevance, alpha: Tensor | None) -> tuple[Mixture, RelevanceInput]:
        """How originals and virtual examples are mixed from the originals, and the labels of both."""
        check_embeddings(embeddings, name="embeddings", caller="SiMix")
        if isinstance(labels, Levels):
            labels.of_batch(len(embeddings), None, caller="SiMix")
        elif not isinstance(labels, Relevance):
            check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller="SiMix")
        classes = self._classes(labels)
        first, second = (pair.to(embeddings.device) for pair in same_class_pairs(classes))
        alpha = self._draw(len(first), embeddings) if alpha is None else alpha
        alone = torch.arange(len(embeddings), device=embeddings.device)
        mixture = (
            torch.cat((alone, first)),
            torch.cat((alone, second)),
            torch.cat((torch.ones_like(alone, dtype=alpha.dtype), alpha)),
        )
        of_all, rank_self = mixture[0].to(classes.device), self.loss.rank_self
        if isinstance(labels, Levels):
            levels = Levels(labels.labels[of_all], gains=labels.gains)
            return mixture, levels.of_batch(len(of_all), None, rank_self=rank_self, caller="SiMix")
        return mixture, Labels(classes[of_all], rank_self=rank_self)


def same_class_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every unordered pair of items with one label: classes by ascending label, items by position."""
    order = labels.argsort(stable=True)
    ascending = labels[order]
    position = torch.arange(len(labels), device=labels.device)
    followers = torch.searchsorted(ascending, ascending, right=True) - position - 1
    first = position.repeat_interleave(followers)
    begin = (followers.cumsum(0) - followers).repeat_interleave(followers)
    second = first + 1 + torch.arange(len(first), device=labels.device) - begin
    return order[first], order[second]
