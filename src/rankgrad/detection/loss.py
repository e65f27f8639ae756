"""RaMBO's AP loss as the classification loss of a detector: `loss(logits, targets)`, for any detector.

The paper leaves three choices open that change what is computed. Each is an option of `DetectionAPLoss`, whose docstring
gives the reasons for its default.
"""

from collections.abc import Hashable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rankgrad._checks import (
    check_choice,
    check_finite,
    check_floating,
    check_not_negative,
    check_positive,
    check_tensor,
    shape_of,
)
from rankgrad.losses.average_precision import AveragePrecision
from rankgrad.losses.multiclass import MulticlassRankLoss
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.exact_rankers import Blackbox

Scores: TypeAlias = Literal["softmax", "sigmoid", "logits"]
Background: TypeAlias = Literal["negative", "class", "none"]

SCORES: tuple[Scores, ...] = ("softmax", "sigmoid", "logits")
BACKGROUNDS: tuple[Background, ...] = ("negative", "class", "none")


class DetectionAPLoss(MulticlassRankLoss):
    """(1 - interclass) * mAP + interclass * APC of the scores of regions (RaMBO, Rolinek et al., 2020).

        loss = DetectionAPLoss()
        loss(logits, targets)       # [regions, 1 + classes], and [regions] with 0 for background

    mAP: every class is one list of all regions, those of the last `memory` calls included; the mean is over the classes that
    have a positive. APC: the scores of all classes of this call are one list, which makes classes comparable with each other.

    What the paper leaves open, and why it is so here:

    - `scores="softmax"`: what is ranked are the probabilities by which the detector orders its boxes at test time, so the
      loss and the metric see the same list; and a margin of 0.15 makes sense between 0 and 1. "sigmoid" suits
      heads with one classifier per class, "logits" ranks raw outputs, where `lam` and `margin` mean something else.
    - `background="negative"`: background is nothing to be retrieved and AP50 has no class for it: its regions are negatives of
      every class, and its column takes part in the softmax alone. "class" ranks it as one more class. "none" is for heads
      that have no column for it: column c is class c + 1.
    - `weight=1`: the value lies in 0..1 beside box and RPN losses of that order, which the paper leaves as they are. With 2 : 1
      for mAP and APC, the paper's ratio, `interclass` is 1/3.
    - `margin_cap=True`: a margin wider than the distance between positives and negatives puts all of the former behind all of
      the latter, too far for the perturbation to bring one past the other, and the gradient is 0. A fresh head, whose scores
      are all but equal, would stay so for ever, and so would a class that is slower than the others. So the margin of a class
      is at most half the difference between the mean scores of its positives and of its negatives in the call: nothing at
      first, and all of it once they lie twice as far apart.

    `lam` refers to ranks divided by the list's length and to the sum of both terms, see `MulticlassRankLoss`; `weight`, and
    whatever else the value is multiplied with, scales the gradient alone.

    Regions that belong to nothing (ignored ones) are to be left out by the caller. The memory is part of `state_dict`; calls in
    evaluation mode do not enter it.

    Args:
        lam: interpolation of the blackbox gradient.
        margin: positives are lowered and negatives raised by half of it before ranking.
        margin_cap: no wider than half of what lies between positives and negatives of a class on average. Remembered scores
            keep the margin of their call.
        interclass: share of APC.
        memory: past calls whose scores lengthen the class lists.
        scores: "softmax", "sigmoid" or "logits".
        background: "negative", "class" or "none".
        weight: factor of the value.
        margin_noise: multiply every shift of the margin by |N(0, 1)|, as the published code does and the paper does not say;
            without cap.
        cuda_graphs: replay calls as CUDA graphs, see `RankLoss`. Each number of regions keeps the memory of one call: turn it
            off where that number is seldom the same.
        validate: check that logits are finite and targets are classes, which synchronises.
    """

    def __init__(
        self,
        *,
        lam: float = 0.5,
        margin: float = 0.15,
        margin_cap: bool = True,
        interclass: float = 1 / 3,
        memory: int = 7,
        scores: Scores = "softmax",
        background: Background = "negative",
        weight: float = 1.0,
        margin_noise: bool = False,
        cuda_graphs: bool = True,
        validate: bool = False,
    ) -> None:
        caller = type(self).__name__
        check_positive(lam, name="lam", caller=caller)
        check_not_negative(margin, name="margin", caller=caller)
        check_choice(scores, SCORES, name="scores", caller=caller)
        check_choice(background, BACKGROUNDS, name="background", caller=caller)
        check_positive(weight, name="weight", caller=caller)
        # a margin that is not noise is already in the scores
        ranker = Blackbox(lam, margin if margin_noise else 0.0, margin_noise)
        super().__init__(RankLoss(ranker, AveragePrecision(), cuda_graphs=cuda_graphs), interclass, memory)
        self.lam, self.margin, self.weight = lam, margin, weight
        self.scores, self.background, self.validate = scores, background, validate
        self.margin_cap, self.margin_noise = margin_cap, margin_noise

    def extra_repr(self) -> str:
        return (
            f"lam={self.lam:g}, margin={self.margin:g}, interclass={self.interclass:.3g}, memory={self.classes.size}, "
            f"scores={self.scores!r}, background={self.background!r}"
        )

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch of regions.

        Args:
            logits: [regions, columns]; column 0 is background's, unless `background` is "none" or `targets` is a matrix.
            targets: [regions] integers, 0 for background; or [regions, columns] of 0 and 1, where no column is background's
                and a region may be of several classes.
        """
        value = super().forward(logits, targets)
        return value if self.weight == 1 else self.weight * value

    def _settings(self) -> Hashable:
        return self.margin, self.margin_cap, self.margin_noise, self.scores, self.background

    def _margin(self, scores: Tensor, relevance: Tensor) -> Tensor:
        """[ranked classes, 1] the margin in this call, a device tensor."""
        if not self.margin_cap:
            return scores.new_full((), self.margin)
        positives, hits = relevance.sum(dim=1, keepdim=True), (scores * relevance).sum(dim=1, keepdim=True)
        misses, negatives = scores.sum(dim=1, keepdim=True) - hits, scores.shape[1] - positives
        lead = hits / positives.clamp(min=1) - misses / negatives.clamp(min=1)
        return (lead / 2).clamp(0, self.margin)

    def _lists(self, logits: Tensor, relevance: Tensor) -> Tensor:
        """[ranked classes, regions] what is ranked, with its margin."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scores == "softmax":
            scores = scores.softmax(dim=1)
        elif self.scores == "sigmoid":
            scores = scores.sigmoid()
        scores = scores.t()[-len(relevance) :].contiguous()
        if self.margin and not self.margin_noise:
            scores = scores + self._margin(scores.detach(), relevance) * (0.5 - relevance.to(scores.dtype))
        return scores

    def _relevance(self, targets: Tensor, num_classes: int) -> Tensor:
        """[ranked classes, regions]."""
        if targets.ndim == 2:
            return (targets > 0).t()
        first = 0 if self.background == "class" else 1
        return torch.arange(first, first + num_classes, device=targets.device)[:, None] == targets

    def _num_classes(self, logits: Tensor, targets: Tensor) -> int:
        return logits.shape[1] - (targets.ndim == 1 and self.background == "negative")

    def _check(self, logits: Tensor, targets: Tensor) -> None:
        caller = type(self).__name__
        check_tensor(logits, name="logits", caller=caller)
        check_floating(logits, name="logits", caller=caller)
        check_tensor(targets, name="targets", caller=caller)
        least = 1 if targets.ndim == 2 or self.background != "negative" else 2
        if logits.ndim != 2 or logits.shape[1] < least:
            wanted = "[regions, 1 + classes]" if least == 2 else "[regions, classes]"
            raise ValueError(f"{caller}: logits must be {wanted}, got shape {shape_of(logits)}")
        if targets.shape not in (logits.shape, logits.shape[:1]):
            raise ValueError(
                f"{caller}: targets must be ({len(logits)},) integers or a matrix of 0 and 1 of the shape of logits "
                f"{shape_of(logits)}, got shape {shape_of(targets)}"
            )
        if targets.ndim == 1 and (targets.is_floating_point() or targets.dtype == torch.bool):
            raise TypeError(f"{caller}: targets must be integers, the class of each region, got {targets.dtype}")
        if self.validate:
            check_finite(logits, name="logits", caller=caller)
            most = 1 if targets.ndim == 2 else logits.shape[1] - (self.background != "none")
            if targets.numel() and bool(((targets < 0) | (targets > most)).any()):
                wrong = targets[(targets < 0) | (targets > most)][0].item()
                what = "0 or 1" if targets.ndim == 2 else f"0 for background or a class up to {most}"
                raise ValueError(f"{caller}: targets must be {what}, got {wrong}; leave ignored regions out")
