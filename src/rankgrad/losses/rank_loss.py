"""The general form of every loss here: scores x ranker x objective."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rankgrad._checks import check_batch, check_choice, check_references, check_scores, check_tensor, shape_of
from rankgrad.losses.temperature import Temperature
from rankgrad.ops.autograd import Objective
from rankgrad.ops.compiled import CompilableLoss
from rankgrad.ops.cuda_graphs import GraphCache
from rankgrad.ops.functional import embedding_losses, score_losses
from rankgrad.ops.labels import Labels
from rankgrad.ops.loss_config import (
    BACKENDS,
    SCORE_PRECISIONS,
    Backend,
    Compute,
    LossConfig,
    LossOutput,
    Reduction,
    ScorePrecision,
)
from rankgrad.ops.masks import Mask
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.relevance import Relevance, RelevanceInput, labels_or_relevance
from rankgrad.ops.score_groups import Groups


class RankLoss(CompilableLoss):
    """A differentiable rank metric: `ranker` makes ranks of scores, `objective` makes a loss of ranks.

        loss = RankLoss(Sigmoid(0.01), AveragePrecision())
        loss(embeddings, labels)                          every item is a query against the rest of the batch
        loss(embeddings, labels, ref_emb, ref_labels)     queries against references
        loss(embeddings, relevance=Pairs(query, item))    relevance that is not one label per item
        loss.from_scores(scores, relevance)               lists of ready scores, also of unequal length

    Labels come in any order with any number of items per class; a candidate is relevant if it has the query's label. Nothing
    of size queries x candidates is kept beyond one tile: memory is O(items x dimensions + relevant pairs).

    Args:
        ranker: `Exact()`, `Sigmoid(tau)`, `UpperBound(tau, rho, delta)`, `Blackbox(lam, margin)`, `Histogram(bins)`.
        objective: one of this package, or any function from `Ranks` of B queries to B losses.
        normalize: L2-normalise embeddings first, so that scores are cosines.
        reduction: "mean" over the queries that count, weighted where a call has `weights`, or "none" for one loss per query in
            the order of the queries. `(losses * loss.query_weights).sum()` is then the mean, in value and gradient.
        empty_query: a query without relevant candidates leaves the mean ("skip"), enters it with loss 0 ("zero"), or
            raises ("error", which synchronises). With reduction "none" its loss is 0.
        backend: "triton" (fused GPU kernels), "tiled" (plain torch, any device), "reference" (the definition, slow,
            float64), or "auto", which takes the kernels where they can run. A request that cannot be met raises.
        precision: of the kernels' scores: "high" (three float16 products, as good as float32), "fast" (one), or "auto":
            "fast" under autocast and for 16-bit embeddings, else "high". Other backends always compute in full precision.
        cuda_graphs: replay a batch on a GPU as CUDA graphs from the second call of its shape on: the host then starts three
            graphs and not hundreds of kernels. That is for up to 20,000 rows, and for more where they take less than a
            fiftieth of the GPU's memory. A shape keeps the memory of one call until `clear_graphs()`, several shapes a
            twentieth of the GPU's. Call that also after changing an attribute of your own objective, which a captured call
            does not notice.
        validate: check tensor contents too (finite embeddings and scores, relevance not negative), which synchronises.
        learn_tau: make the temperature of `Sigmoid` or `UpperBound` a parameter, beginning with the ranker's. Give the
            optimizer `loss.parameters()` too.
        tau_end: temperature at the end of a training run by `fit`, which lowers or raises it by equal factors. In a loop of
            your own assign `loss.tau`, which also tells the present value.
        ignore_label: label of distractors: candidates that are relevant to no query, and queries that are empty.

    After a call `used_queries` is the number of queries with a relevant candidate and `query_weights` the weight of each query
    in the mean, one number where all weigh the same. Both are device tensors; reading them synchronises.
    """

    used_queries: Tensor
    query_weights: Tensor

    def __init__(
        self,
        ranker: Ranker,
        objective: Objective,
        *,
        normalize: bool = True,
        reduction: Literal["mean", "none"] = "mean",
        empty_query: Literal["skip", "zero", "error"] = "skip",
        backend: Backend = "auto",
        precision: ScorePrecision = "auto",
        cuda_graphs: bool = True,
        validate: bool = False,
        learn_tau: bool = False,
        tau_end: float | None = None,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(ranker, Ranker):
            raise TypeError(f"{self.name}: ranker must be a Ranker such as Sigmoid(0.01), got {ranker!r}")
        if not callable(objective) or isinstance(objective, type):
            raise TypeError(f"{self.name}: objective must be a function of Ranks such as AveragePrecision(), got {objective!r}")
        check_choice(reduction, ("mean", "none"), name="reduction", caller=self.name)
        check_choice(empty_query, ("skip", "zero", "error"), name="empty_query", caller=self.name)
        check_choice(backend, BACKENDS, name="backend", caller=self.name)
        check_choice(precision, SCORE_PRECISIONS, name="precision", caller=self.name)
        self.ranker, self.objective = ranker, objective
        self.normalize, self.reduction, self.empty_query = normalize, reduction, empty_query
        self.backend, self.precision, self.cuda_graphs, self.validate = backend, precision, cuda_graphs, validate
        self.ignore_label, self.rank_self = ignore_label, False  # rank_self: the query is an irrelevant candidate of its list
        self.temperature = Temperature(ranker, learned=learn_tau, last=tau_end, caller=self.name)
        self._graphs = GraphCache()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def tau(self) -> float | Tensor:
        """The temperature of the ranker as it is now; assign a number to change it, at any time and without cost."""
        value = self.temperature.value(self.ranker)
        return value.detach() if isinstance(value, Tensor) else value

    @tau.setter
    def tau(self, value: float) -> None:
        self.temperature.set(self.ranker, value)

    def set_progress(self, done: float) -> None:
        """Follow the schedule of tau; `done` is the share of training steps taken, 0 to 1. `fit` calls it at every step."""
        last = self.temperature.last
        if last is not None:
            first: float = self.ranker.tau  # type: ignore[attr-defined]
            self.tau = first * (last / first) ** done

    def changing_settings(self) -> dict[str, float]:
        """What changes during training, for the journal of `fit`; synchronises."""
        return {"tau": float(self.tau)} if self.temperature.changes else {}

    def extra_repr(self) -> str:
        return f"{self.ranker}, {self.objective}, normalize={self.normalize}, reduction={self.reduction!r}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        relevance: Relevance | None = None,
        self_index: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Loss of embeddings [Q, d] ranked against themselves or against references [C, d].

        Args:
            embeddings: [Q, d] of the queries.
            labels: [Q] integers; a candidate is relevant if it has the query's label. A `relevance` works in this place too.
            ref_emb: [C, d] of the candidates. Without it query i is candidate i.
            ref_labels: [C] their labels.
            relevance: `Pairs` or `Levels` in place of labels.
            self_index: [Q] position of each query among the references, -1 where it is not among them; a query is never its
                own candidate.
            weights: [Q] of at least 0, weigh the queries in the mean.
        """
        if torch.compiler.is_compiling():
            inputs = {"embeddings": embeddings, "ref_emb": ref_emb}
            others = {"labels": labels, "ref_labels": ref_labels, "self_index": self_index, "weights": weights}
            others["relevance"] = relevance
            return self.compiled_call("forward", inputs, others, one_value=self.reduction == "mean")
        given = self.checked_relevance(embeddings, labels, ref_emb, ref_labels, self_index, weights, relevance)
        return self.of_embeddings(embeddings, ref_emb, given, weights=weights)

    def shard_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance,
        rows: slice,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """What the queries `rows` add to the loss of a batch, which its shards sum up to. References begin with the batch."""
        self_index = None if ref_emb is None else torch.arange(len(embeddings), device=embeddings.device)
        given = self.checked_relevance(embeddings, labels, ref_emb, ref_labels, self_index, weights)
        return self.of_embeddings(embeddings, ref_emb, given, weights=weights, shard=rows)

    def checked_relevance(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        self_index: Tensor | None,
        weights: Tensor | None,
        relevance: Relevance | None = None,
    ) -> RelevanceInput:
        """Who is relevant to whom, after all arguments of a call have been checked."""
        given = labels_or_relevance(labels, relevance, self.name)
        if isinstance(given, Tensor) or not isinstance(given, Relevance):  # asking for a protocol takes long
            check_batch(embeddings, given, ref_emb, ref_labels, self_index, weights, validate=self.validate, caller=self.name)
            return self.relevance(given, ref_labels, self_index)
        check_references(embeddings, ref_emb, self_index, weights, validate=self.validate, caller=self.name)
        for name, value in (("ref_labels", ref_labels), ("ignore_label", self.ignore_label)):
            if value is not None:
                raise ValueError(f"{self.name}: {name} goes with labels [Q], not with {type(given).__name__}: omit it")
        candidates = None if ref_emb is None else len(ref_emb)
        return given.of_batch(len(embeddings), candidates, self_index, rank_self=self.rank_self, caller=self.name)

    def relevance(self, labels: Tensor, ref_labels: Tensor | None = None, self_index: Tensor | None = None) -> Labels:
        """Who is relevant to whom by labels, with the settings of this loss."""
        return Labels.of(labels, ref_labels, self_index, rank_self=self.rank_self, ignore_label=self.ignore_label)

    def of_embeddings(self, queries: Tensor, candidates: Tensor | None, relevance: RelevanceInput, **options: Any) -> Tensor:
        """`embedding_losses` with the settings of this loss."""
        scale, config = self.temperature.score_scale(self.ranker), self.config
        output = embedding_losses(
            queries, candidates, relevance, config, score_scale=scale, graphs=self._graphs, caller=self.name, **options
        )
        return self._noted(output)

    def from_scores(
        self,
        scores: Tensor,
        relevance: Tensor,
        *,
        candidates: Tensor | None = None,
        group_sizes: Sequence[int] | Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Loss of ready scores [Q, n], or of one list [n], higher is nearer. The query itself must not be among them.

        Args:
            scores: floating point.
            relevance: of the same shape; bool, or graded with numbers of at least 0, relevant where above 0.
            candidates: bool of the same shape, False for scores that are not ranked at all. For lists padded with relevance -1,
                as in allRank, pass `relevance >= 0`.
            group_sizes: [Q] lengths of lists that follow each other in `scores` [N], as in LightGBM; they add up to N.
            weights: [Q] of the lists in the mean, at least 0.
        """
        if torch.compiler.is_compiling():
            sizes = None if group_sizes is None else torch.as_tensor(group_sizes)
            others = {"relevance": relevance, "candidates": candidates, "group_sizes": sizes, "weights": weights}
            return self.compiled_call("from_scores", {"scores": scores}, others, one_value=self.reduction == "mean")
        caller, lists = f"{self.name}.from_scores", None
        if group_sizes is not None:
            check_tensor(scores, name="scores", caller=caller)
            if scores.ndim != 1:
                raise ValueError(f"{caller}: with group_sizes scores must be [items], got shape {shape_of(scores)}")
            lists = Groups.of(group_sizes, len(scores), caller)
        check_scores(
            scores,
            relevance,
            candidates,
            weights,
            lists=None if lists is None else len(lists),
            validate=self.validate,
            caller=caller,
        )
        if lists is not None:
            at, valid = lists.padded(scores.device)
            scores, relevance = scores[at], relevance[at]
            candidates = valid if candidates is None else valid & candidates[at]
        scale = self.temperature.score_scale(self.ranker)
        scores = scores if scale is None else scores * scale
        mask = Mask(relevance, candidates)
        output = score_losses(scores, mask, self.config, weights=weights, graphs=self._graphs, caller=self.name)
        return self._noted(output)

    def _noted(self, output: LossOutput) -> Tensor:
        # a module looks for parameters in all that is assigned to it, which takes as long as a launch
        vars(self).update(used_queries=output.used_queries, query_weights=output.query_weights)
        return output.loss

    @property
    def config(self) -> LossConfig:
        compute = Compute(self.normalize, self.backend, self.precision, self.cuda_graphs)
        return LossConfig(self.ranker, self.objective, Reduction(self.reduction, self.empty_query), compute)

    def prepare_labels(self, labels: Any) -> None:
        """Start the next call on a GPU before its embeddings are there; pass the same tensor of labels to that call.

        A captured call reads the number of positives back from the GPU, and so waits for the model where it has not been
        started before. `LargeBatch` and `fit` call this before the model.
        """
        plain = isinstance(labels, Tensor) and labels.is_cuda and labels.dtype == torch.long and not labels.is_inference()
        if plain and self.ignore_label is None:
            with torch.cuda.device_of(labels):
                self._graphs.begin((labels,))

    def clear_graphs(self) -> None:
        """Free the GPU memory of captured CUDA graphs, at the end of a training run for instance."""
        self._graphs.clear()
