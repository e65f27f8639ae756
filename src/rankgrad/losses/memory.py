"""Longer lists from past batches: more candidates to rank against, without a gradient to them.

Both memories are part of `state_dict`, so a resumed run ranks against the same lists as an uninterrupted one.
"""

from typing import Any

import torch
from torch import Tensor

from rankgrad._checks import check_count, shape_of
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.compiled import CompilableLoss
from rankgrad.ops.relevance import Relevance, labels_or_relevance


class _Memory(CompilableLoss):
    """Pairs of tensors of the last `size` calls, oldest first. Calls in evaluation mode are not remembered."""

    def __init__(self, loss: RankLoss, size: int) -> None:
        super().__init__()
        caller = type(self).__name__
        if not isinstance(loss, RankLoss):
            raise TypeError(f"{caller}: loss must be a RankLoss, got {type(loss).__name__}")
        check_count(size, name="size", caller=caller, least=0)
        self.loss, self.size = loss, size
        self.past: list[tuple[Tensor, Tensor]] = []

    @property
    def used_queries(self) -> Tensor:
        return self.loss.used_queries

    def clear_graphs(self) -> None:
        """See `RankLoss.clear_graphs`."""
        self.loss.clear_graphs()

    def reset(self) -> None:
        """Forget past calls."""
        self.past = []

    def remember(self, first: Tensor, second: Tensor) -> None:
        """Keep the tensors of a call and drop the oldest."""
        if self.training and self.size:
            self.past = [*self.past, (first.detach().clone(), second.detach().clone())][-self.size :]

    def get_extra_state(self) -> dict[str, Any]:
        return {"past": [list(pair) for pair in self.past]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.past = [tuple(pair) for pair in state["past"]][-self.size :] if self.size else []


class EmbeddingMemory(_Memory):
    """`loss` of a batch ranked against itself and the embeddings of the last `size` batches.

    With b items in the batch and k in memory each list has b - 1 + k candidates, and a `Blackbox` ranker normalises by that
    length. The memory holds embeddings of earlier weights: the faster the model changes, the smaller `size` should be. These
    have no gradient, so a batch can get ahead of them by moving as a whole, and embeddings may collapse: compare with a run
    without a memory before you rely on one.

    In `Pairs` the items b, b + 1, ... are those in memory, oldest first; a query is ranked against all of them, and those that
    no pair names are irrelevant to it.
    """

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance | None = None,
        *,
        relevance: Relevance | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Loss of embeddings [N, d] with labels [N] or `relevance`; see `RankLoss`."""
        if torch.compiler.is_compiling():
            others = {"labels": labels, "relevance": relevance, "weights": weights}
            one_value = self.loss.reduction == "mean"
            return self.compiled_call("forward", {"embeddings": embeddings}, others, one_value=one_value)
        labels = labels_or_relevance(labels, relevance, "EmbeddingMemory")
        if self.past:
            self_index = torch.arange(len(embeddings), device=embeddings.device)
            lengthened, *references = self._lengthened(embeddings, labels)
            value: Tensor = self.loss(embeddings, lengthened, *references, self_index=self_index, weights=weights)
        else:
            value = self.loss(embeddings, labels, weights=weights)
        self.remember(embeddings, labels)
        return value

    def remember(self, first: Tensor, second: Tensor | Relevance) -> None:
        """Keep the embeddings of a call with what says who is relevant to them, and drop the oldest."""
        super().remember(first, second if isinstance(second, Tensor) else second.item_rows(len(first)))

    def shard_loss(
        self, embeddings: Tensor, labels: Tensor | Relevance, rows: slice, *, weights: Tensor | None = None
    ) -> Tensor:
        """What the queries `rows` contribute to the loss of a batch, which is not remembered; see `RankLoss.shard_loss`."""
        relevance, *references = self._lengthened(embeddings, labels) if self.past else (labels,)
        return self.loss.shard_loss(embeddings, relevance, rows, *references, weights=weights)

    def _lengthened(self, embeddings: Tensor, labels: Tensor | Relevance) -> tuple[Any, ...]:
        """Relevance, and as references the batch followed by what is in memory."""
        if embeddings.ndim == 2 and self.past[0][0].shape[1] != embeddings.shape[1]:
            held = self.past[0][0].shape[1]
            raise ValueError(
                f"EmbeddingMemory: embeddings must have the {held} dimensions of those in memory, got {embeddings.shape[1]}"
            )
        rows = labels if isinstance(labels, Tensor) else labels.item_rows(len(embeddings))
        if self.past[0][1].shape[1:] != rows.shape[1:]:
            raise ValueError(
                f"EmbeddingMemory: labels must be of the kind that those in memory are, got {type(labels).__name__}; "
                "call reset() before another kind"
            )
        ref_emb = torch.cat((embeddings, *(e.to(embeddings) for e, _ in self.past)))
        ref_rows = torch.cat((rows, *(past.to(rows) for _, past in self.past)))
        return (labels, ref_emb, ref_rows) if isinstance(labels, Tensor) else (labels.with_references(ref_rows), ref_emb)


class ScoreMemory(_Memory):
    """`loss` of score lists lengthened by the scores of the last `size` calls (RaMBO section 4.3).

    Row q of each call continues row q of the calls before: the rows are the same lists over time, such as the classes of a
    detector, and the columns are new items. Calls may have different numbers of columns.
    """

    def from_scores(self, scores: Tensor, relevance: Tensor) -> Tensor:
        if self.past and scores.ndim == 2 and self.past[0][0].shape[0] != scores.shape[0]:
            held = self.past[0][0].shape[0]
            raise ValueError(f"ScoreMemory: scores must have the {held} rows of those in memory, got shape {shape_of(scores)}")
        all_scores = torch.cat((scores, *(s.to(scores) for s, _ in self.past)), dim=-1)
        value = self.loss.from_scores(all_scores, torch.cat((relevance, *(r.to(relevance) for _, r in self.past)), dim=-1))
        self.remember(scores, relevance)
        return value
