"""SiMix (Patel et al., 2022): virtual examples between all pairs of one class, for any loss of this package."""

import copy

import torch
from torch import Tensor, nn

from rankgrad._checks import check_embeddings, check_labels
from rankgrad.losses.objectives import RecallAtK
from rankgrad.losses.presets import RecallAtKLoss
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.functional import Mixture, resolve_precision
from rankgrad.ops.relevance import LabelLists

PAPER_KS = (1, 2, 4, 8, 16)
PAPER_KS_WITH_SIMIX = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


class SiMix(nn.Module):
    """`loss` on the batch and on a virtual example alpha x + (1 - alpha) z for every pair x, z of one class (eq. 8-10).

    A virtual example has the class of its pair, is a query and a candidate like any other, and is not brought back to
    length 1, so its scores are mixtures of scores. alpha ~ U(0, 1) is drawn for each from `generator` (torch's own if None).

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

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        originals, mixed, mixed_labels = self._mixed(embeddings, labels, None)
        lists = LabelLists.build(mixed_labels, own_is_ranked=self.loss.own_is_ranked)
        precision = resolve_precision(self.loss.precision, embeddings)
        return self.loss.over_lists(lists, originals, mixed=mixed, precision=precision)

    def part(self, embeddings: Tensor, labels: Tensor, own: slice, alpha: Tensor) -> Tensor:
        """What a share of the queries adds to the loss of a batch, as large a share as `own` is of the originals.

        The parts of slices that make up the batch sum up to the loss if all have the `alpha` of one `draw`.
        """
        originals, mixed, mixed_labels = self._mixed(embeddings, labels, alpha)
        place = torch.arange(len(mixed_labels), device=mixed_labels.device)
        rows = slice(*(edge * len(mixed_labels) // len(labels) for edge in (own.start, own.stop)))
        first, second, share = mixed
        build, own_is_ranked = LabelLists.build, self.loss.own_is_ranked
        return self.loss.over_lists(
            build(mixed_labels[rows], mixed_labels, place[rows], own_is_ranked=own_is_ranked),
            originals,
            originals,
            mixed=(first[rows], second[rows], share[rows]),
            mixed_candidates=mixed,
            precision=resolve_precision(self.loss.precision, embeddings),
            in_mean=build(mixed_labels, own_is_ranked=own_is_ranked).num_relevant,
        )

    def draw(self, labels: Tensor, like: Tensor) -> Tensor:
        """The alpha of every virtual example of a batch, in the precision of scores of `like`, on its device."""
        device = like.device if self.generator is None else self.generator.device
        dtype = torch.promote_types(like.dtype, torch.float32)
        pairs = len(same_class_pairs(labels)[0])
        return torch.rand(pairs, generator=self.generator, device=device, dtype=dtype).to(like.device)

    def _mixed(self, embeddings: Tensor, labels: Tensor, alpha: Tensor | None) -> tuple[Tensor, Mixture, Tensor]:
        """Prepared originals, how originals and virtual examples are mixed from them, and the labels of both."""
        check_embeddings(embeddings, name="embeddings", caller="SiMix")
        check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller="SiMix")
        originals = self.loss.prepared(embeddings)
        first, second = (pair.to(originals.device) for pair in same_class_pairs(labels))
        alpha = self.draw(labels, originals) if alpha is None else alpha
        alone = torch.arange(len(labels), device=originals.device)
        mixture = (
            torch.cat((alone, first)),
            torch.cat((alone, second)),
            torch.cat((torch.ones_like(alone, dtype=alpha.dtype), alpha)),
        )
        return originals, mixture, torch.cat((labels, labels[first.to(labels.device)]))


def same_class_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every unordered pair of items with one label: classes by ascending label, items by position."""
    order = labels.argsort(stable=True)
    ascending = labels[order]
    place = torch.arange(len(labels), device=labels.device)
    followers = torch.searchsorted(ascending, ascending, right=True) - place - 1
    first = place.repeat_interleave(followers)
    begin = (followers.cumsum(0) - followers).repeat_interleave(followers)
    second = first + 1 + torch.arange(len(first), device=labels.device) - begin
    return order[first], order[second]
