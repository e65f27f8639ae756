"""Rank losses of a score matrix [items, classes]: the classification of a detector, or multi-label tagging."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad._checks import check_count, check_not_negative, check_tensor, shape_of
from rankgrad.losses.average_precision import RamboAPLoss
from rankgrad.losses.memory import ScoreMemory
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.cuda_graphs import GraphCache, GraphProgram, side_by_side
from rankgrad.ops.functional import score_program


class MulticlassRankLoss(nn.Module):
    """(1 - interclass) * mAP + interclass * APC, the two forms of RaMBO's AP loss (eq. 22-23), with any rank loss.

    mAP: every class is a list of all items, its own positives relevant; the mean is over the classes that have a positive.
    APC: all scores of all classes are one list.

    The `lam` of a `Blackbox` ranker is that of the whole sum: Algorithm 1 of the paper gets the derivative of the whole loss,
    so the perturbation of a term contains its weight, 1 - interclass or interclass, as in the published code.

    Args:
        loss: what is computed on a list; `RamboAPLoss()` if None.
        interclass: weight of APC. The paper's ratio of 2 : 1 is 1/3.
        memory: past calls whose scores lengthen the class lists (not the APC list, as in the published code).
    """

    def __init__(self, loss: RankLoss | None = None, interclass: float = 1 / 3, memory: int = 0) -> None:
        super().__init__()
        caller = type(self).__name__
        loss = RamboAPLoss() if loss is None else loss
        check_not_negative(interclass, name="interclass", caller=caller)
        if interclass > 1:
            raise ValueError(f"{caller}: interclass must be within 0 and 1, got {interclass!r}")
        check_count(memory, name="memory", caller=caller, least=0)
        if loss.reduction != "mean":
            raise ValueError(f"{caller}: loss must have reduction 'mean', got {loss.reduction!r}")
        self.interclass = interclass
        # a term without weight is never computed
        self.classes = ScoreMemory(self._term(loss, 1 - interclass or 1.0), memory)
        self.across = self._term(loss, interclass or 1.0)
        self._graphs = GraphCache()

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Scores [items, classes] and targets of the same shape, bool or graded."""
        self._check(scores, targets)
        if not len(scores):
            return scores.sum()
        num_classes = self._num_classes(scores, targets)
        program = self._program(scores, num_classes)
        if program is not None:
            return self._by_program(scores, targets, program)
        relevance = self._relevance(targets, num_classes)
        lists = self._lists(scores, relevance)
        value = lists.new_zeros(())
        if self.interclass < 1:
            value = value + (1 - self.interclass) * self.classes.from_scores(lists, relevance)
        if self.interclass > 0:
            value = value + self.interclass * self.across.from_scores(lists.reshape(-1), relevance.reshape(-1))
        return value

    def reset(self) -> None:
        """Forget past calls."""
        self.classes.reset()

    def clear_graphs(self) -> None:
        """See `RankLoss.clear_graphs`."""
        self._graphs.clear()
        self.classes.clear_graphs()
        self.across.clear_graphs()

    def _term(self, loss: RankLoss, weight: float) -> RankLoss:
        """The loss of one of the two terms, which enters the sum with `weight`."""
        term = copy.copy(loss)
        term.ranker = loss.ranker.weighted(weight)
        return term

    def _num_classes(self, scores: Tensor, targets: Tensor) -> int:
        """Number of ranked classes."""
        return scores.shape[1]

    def _relevance(self, targets: Tensor, num_classes: int) -> Tensor:
        """[ranked classes, items]."""
        return targets.t()

    def _lists(self, scores: Tensor, relevance: Tensor) -> Tensor:
        """[ranked classes, items] what is ranked. May be captured: does not synchronise."""
        return scores.t()

    def _settings(self) -> Hashable:
        """What `_lists` and `_relevance` depend on besides their arguments."""
        return None

    def _check(self, scores: Tensor, targets: Tensor) -> None:
        caller = type(self).__name__
        check_tensor(scores, name="scores", caller=caller)
        check_tensor(targets, name="targets", caller=caller)
        if scores.ndim != 2 or targets.shape != scores.shape:
            got = f"scores {shape_of(scores)} and targets {shape_of(targets)}"
            raise ValueError(f"{caller}: scores and targets must both be [items, classes], got {got}")

    def _program(self, scores: Tensor, num_classes: int) -> GraphProgram | None:
        """Both terms as one program from targets, past scores and past relevance; None where the call cannot be captured."""
        past = self.classes.past
        if not 0 < self.interclass < 1 or any(len(old) != num_classes for old, _ in past):
            return None  # another number of classes is an error, which the memory reports
        length = len(scores) + sum(old.shape[1] for old, _ in past)
        caller = type(self).__name__
        class_program = score_program(scores, (num_classes, length), self.classes.loss.config, caller=caller)
        across_program = score_program(scores, (1, num_classes * len(scores)), self.across.config, caller=caller)
        if class_program is None or across_program is None:
            return None

        def build(targets: Tensor, *past: Tensor) -> tuple[Any, Tensor]:
            past_scores, past_relevance = past[: len(past) // 2], past[len(past) // 2 :]
            relevance = self._relevance(targets, num_classes)
            of_classes, most = class_program.build(torch.cat((relevance, *past_relevance), dim=1))
            of_all, most_of_all = across_program.build(relevance.reshape(1, -1))
            return (relevance, past_scores, of_classes, of_all), torch.cat((most, most_of_all))

        def loss(scores: Tensor, built: Any, widths: Sequence[int]) -> tuple[Tensor, ...]:
            relevance, past_scores, of_classes, of_all = built
            lists = self._lists(scores, relevance)
            (mean, *_), (across, *_) = side_by_side(
                scores.device,
                lambda: class_program.loss(torch.cat((lists, *past_scores), dim=1), of_classes, widths[:1]),
                lambda: across_program.loss(lists.reshape(1, -1), of_all, widths[1:]),
            )
            value = (1 - self.interclass) * mean + self.interclass * across
            return value, lists.detach(), relevance

        return GraphProgram((num_classes, 1), build, loss)

    def _by_program(self, scores: Tensor, targets: Tensor, program: GraphProgram) -> Tensor:
        """The whole loss as CUDA graphs: its hundreds of launches would take longer than its work."""
        # a memory may come from a checkpoint of another device
        dtype = torch.promote_types(scores.dtype, torch.float32)
        past_scores = [old.to(scores.device, dtype) for old, _ in self.classes.past]
        past_relevance = [old.to(scores.device) for _, old in self.classes.past]
        inputs = (targets.to(scores.device), *past_scores, *past_relevance)
        key = (self.classes.loss.config, self.across.config, self.interclass, self._settings())
        with torch.cuda.device_of(scores):
            value, *seen = self._graphs.run(key, scores, inputs, program) or program.run(scores, inputs)
        self.classes.remember(*seen)
        return value
