"""Rank losses of a score matrix [items, classes]: the classification of a detector, or multi-label tagging."""

from torch import Tensor, nn

from rankgrad._checks import check_count, check_not_negative, check_tensor, shape_of
from rankgrad.losses.memory import ScoreMemory
from rankgrad.losses.presets import RamboAPLoss
from rankgrad.losses.rank_loss import RankLoss


class MulticlassRankLoss(nn.Module):
    """(1 - interclass) * mAP + interclass * APC, the two forms of RaMBO's AP loss (eq. 22-23), with any rank loss.

    mAP: every class is a list of all items, its own positives relevant; the mean is over the classes that have a positive.
    APC: all scores of all classes are one list.

    Args:
        loss: what is computed on a list; `RamboAPLoss()` if None.
        interclass: weight of APC. The paper's ratio of 2 : 1 is 1/3.
        memory: past calls whose scores lengthen the class lists (not the APC list, as in the published code).
    """

    def __init__(self, loss: RankLoss | None = None, interclass: float = 1 / 3, memory: int = 0) -> None:
        super().__init__()
        loss = RamboAPLoss() if loss is None else loss
        check_not_negative(interclass, name="interclass", caller="MulticlassRankLoss")
        if interclass > 1:
            raise ValueError(f"MulticlassRankLoss: interclass must be within 0 and 1, got {interclass!r}")
        check_count(memory, name="memory", caller="MulticlassRankLoss", least=0)
        if loss.reduction != "mean":
            raise ValueError(f"MulticlassRankLoss: loss must have reduction 'mean', got {loss.reduction!r}")
        self.loss, self.interclass = loss, interclass
        self.lists = ScoreMemory(loss, memory)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Scores [items, classes] and targets of the same shape, bool or graded."""
        check_tensor(scores, name="scores", caller="MulticlassRankLoss")
        check_tensor(targets, name="targets", caller="MulticlassRankLoss")
        if scores.ndim != 2 or targets.shape != scores.shape:
            got = f"scores {shape_of(scores)} and targets {shape_of(targets)}"
            raise ValueError(f"MulticlassRankLoss: scores and targets must both be [items, classes], got {got}")
        return (1 - self.interclass) * self.mean_over_classes(scores, targets) + self.interclass * self.across_classes(
            scores, targets
        )

    def mean_over_classes(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.lists.from_scores(scores.t(), targets.t())

    def across_classes(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.loss.from_scores(scores.reshape(-1), targets.reshape(-1))
