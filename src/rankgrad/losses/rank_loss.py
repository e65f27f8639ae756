"""The general form of every loss here: scores x ranker x objective."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rankgrad._checks import (
    check_choice,
    check_embeddings,
    check_finite,
    check_floating,
    check_labels,
    check_tensor,
    shape_of,
)
from rankgrad.ops import reference
from rankgrad.ops.autograd import Objective, Plan, all_scores, rank_losses
from rankgrad.ops.functional import (
    BACKENDS,
    PRECISIONS,
    Backend,
    Mixture,
    Precision,
    Replays,
    fused_door,
    normalized,
    resolve,
    resolve_precision,
    score_door,
    tiled_door,
)
from rankgrad.ops.rankers import Blackbox, Ranker
from rankgrad.ops.relevance import LabelLists, ScoreLists
from rankgrad.ops.sources import is_one_tile

if TYPE_CHECKING:
    from rankgrad.ops.cuda_graphs import Steps

Reduction = Literal["mean", "none"]
EmptyQuery = Literal["skip", "zero", "error"]


class RankLoss(nn.Module):
    """A differentiable rank metric: `ranker` makes ranks of scores, `objective` makes a loss of ranks.

        loss = RankLoss(Sigmoid(0.01), AveragePrecision())
        loss(embeddings, labels)                          every item is a query against the rest of the batch
        loss(embeddings, labels, ref_emb, ref_labels)     queries against references
        loss.from_scores(scores, relevance)               lists of scores that exist already

    Labels may come in any order with any number of items per class; a candidate is relevant if it has the query's label.
    Nothing of size queries x candidates is kept beyond one tile, in forward or backward: memory is O(items x dimensions +
    relevant pairs).

    Args:
        ranker: `Exact()`, `Sigmoid(tau)`, `Blackbox(lam, margin)`, `Histogram(bins)`.
        objective: one of this package, or any function from `Ranks` of B queries to B losses.
        normalize: L2-normalise embeddings first, so that scores are cosines.
        reduction: "mean" over the queries that count, or "none" for one loss per query in the order of the queries.
        empty_query: a query without relevant candidates leaves the mean ("skip"), enters it with loss 0 ("zero"), or
            raises ("error", which waits for the device). With reduction "none" its loss is 0.
        backend: "triton" (fused GPU kernels), "tiled" (plain torch, any device), "reference" (the definition, slow,
            float64), or "auto", which takes the kernels where they can run. A request that cannot be met raises.
        precision: of the kernels' scores: "high" (three float16 products, as good as float32), "fast" (one), or "auto":
            "fast" under autocast and for 16-bit embeddings, else "high". Other backends always compute in full precision.
        cuda_graphs: replay a small batch on a GPU as CUDA graphs from its second call on: the host then starts three graphs
            and not hundreds of kernels. Each shape keeps the memory of one call.
        validate: check tensor contents too (finite embeddings and scores, relevance not negative), which waits for the
            device.

    After a call `used_queries` holds how many queries had something to find, as a tensor that nobody has waited for.
    """

    used_queries: Tensor

    def __init__(
        self,
        ranker: Ranker,
        objective: Objective,
        *,
        normalize: bool = True,
        reduction: Reduction = "mean",
        empty_query: EmptyQuery = "skip",
        backend: Backend = "auto",
        precision: Precision = "auto",
        cuda_graphs: bool = True,
        validate: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(ranker, Ranker):
            raise TypeError(f"{self.name}: ranker must be a Ranker such as Sigmoid(0.01), got {ranker!r}")
        if not callable(objective) or isinstance(objective, type):
            raise TypeError(f"{self.name}: objective must be a function of Ranks such as AveragePrecision(), got {objective!r}")
        check_choice(reduction, ("mean", "none"), name="reduction", caller=self.name)
        check_choice(empty_query, ("skip", "zero", "error"), name="empty_query", caller=self.name)
        check_choice(backend, BACKENDS, name="backend", caller=self.name)
        check_choice(precision, PRECISIONS, name="precision", caller=self.name)
        self.ranker, self.objective = ranker, objective
        self.normalize, self.reduction, self.empty_query = normalize, reduction, empty_query
        self.backend, self.precision, self.validate = backend, precision, validate
        self.cuda_graphs = cuda_graphs
        self.own_is_ranked = False
        self._replays = Replays()

    @property
    def name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        return f"{self.ranker}, {self.objective}, normalize={self.normalize}, reduction={self.reduction!r}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        self_index: Tensor | None = None,
    ) -> Tensor:
        """Loss of embeddings [Q, d] with labels [Q], ranked against themselves or against references [C, d].

        `self_index` [Q] tells where each query stands among the references, -1 for nowhere; a query is never its own
        candidate. Without references query i is candidate i.
        """
        self._check_embeddings(embeddings, labels, ref_emb, ref_labels, self_index)
        if ref_emb is None and self._is_capturable(embeddings):
            captured = self._replay(embeddings, labels)
            if captured is not None:
                return captured
        lists = LabelLists.build(labels, ref_labels, self_index, own_is_ranked=self.own_is_ranked)
        queries = self.prepared(embeddings)
        candidates = None if ref_emb is None else self.prepared(ref_emb).to(queries.dtype)
        return self.over_lists(lists, queries, candidates, precision=resolve_precision(self.precision, embeddings))

    def part(
        self, embeddings: Tensor, labels: Tensor, own: slice, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Tensor:
        """What the queries `own` add to the loss of a batch: the parts of slices that make up the batch sum up to the loss.

        References, where they are given, begin with the batch itself.
        """
        self._check_embeddings(embeddings, labels, ref_emb, ref_labels, None)
        everyone = self.prepared(embeddings if ref_emb is None else ref_emb)
        all_labels = labels if ref_labels is None else ref_labels
        place = torch.arange(len(labels), device=labels.device)
        lists = LabelLists.build(labels[own], all_labels, place[own], own_is_ranked=self.own_is_ranked)
        whole = LabelLists.build(labels, all_labels, place, own_is_ranked=self.own_is_ranked)
        precision = resolve_precision(self.precision, embeddings)
        return self.over_lists(lists, everyone[own], everyone, precision=precision, in_mean=whole.num_relevant)

    def prepared(self, embeddings: Tensor) -> Tensor:
        """Embeddings as they enter the scores: at least float32, and of length 1 if so chosen."""
        embeddings = _widened(embeddings)
        return normalized(embeddings, self.backend, self.ranker, caller=self.name) if self.normalize else embeddings

    def over_lists(
        self,
        lists: LabelLists,
        queries: Tensor,
        candidates: Tensor | None = None,
        *,
        mixed: Mixture | None = None,
        mixed_candidates: Mixture | None = None,
        precision: Literal["fast", "high"] = "high",
        in_mean: Tensor | None = None,
    ) -> Tensor:
        """Loss of prepared embeddings over given lists.

        Args:
            lists: who is ranked for whom.
            queries: [Q, d], or what they are mixed from.
            candidates: [C, d], or what they are mixed from; None where queries are the candidates.
            mixed: (first, second, alpha), ranks mixtures of `queries`.
            mixed_candidates: the same for `candidates`.
            precision: of the kernels' scores.
            in_mean: relevant candidates of every query in the mean, where `lists` hold only some of these queries.
        """
        unit = self._count_queries(lists.num_relevant if in_mean is None else in_mean, queries)
        backend = resolve(self.backend, queries, self.ranker, caller=self.name)
        one_tile = backend == "tiled" and is_one_tile(lists, queries.device)
        if mixed is not None and (backend != "tiled" or one_tile):
            queries = _mixed_rows(queries, mixed)
            if candidates is not None and mixed_candidates is not None:
                candidates = _mixed_rows(candidates, mixed_candidates)
        if one_tile:
            # all scores at once are no more than a tile, and to keep them is quicker than to make them twice
            scores = all_scores(queries, queries if candidates is None else candidates)
            on_device = lists.to(queries.device)
            return self._run(score_door(ScoreLists.build(*on_device.dense()), "tiled"), unit, scores)
        if backend == "reference":
            scores = queries.double() @ (queries if candidates is None else candidates).double().t()
            relevance, ranked = lists.dense()
            return self._reduce(reference.rank_losses(scores, relevance, ranked, self.ranker, self.objective, unit), unit)
        if backend == "triton":
            door = fused_door(lists, queries.device, precision, unit_rows=self.normalize)
        else:
            door = tiled_door(lists, queries.device, mixed, mixed_candidates)
        return self._run(door, unit, *((queries,) if candidates is None else (queries, candidates)))

    def _is_capturable(self, embeddings: Tensor) -> bool:
        return (
            self._may_capture(embeddings)
            and resolve(self.backend, _widened(embeddings.detach()[:0]), self.ranker, caller=self.name) == "triton"
        )

    def _may_capture(self, tensor: Tensor) -> bool:
        return (
            self.cuda_graphs
            and tensor.is_cuda
            and tensor.requires_grad
            and torch.is_grad_enabled()
            and self.empty_query != "error"
            and self.ranker.differentiable
            and not torch.cuda.is_current_stream_capturing()
        )

    def _replay(self, embeddings: Tensor, labels: Tensor) -> Tensor | None:
        """The loss of a small batch as CUDA graphs; None where it must run as usual."""
        from rankgrad.ops.cuda_graphs import MOST_ROWS, Steps

        if len(embeddings) > MOST_ROWS:
            return None
        precision = resolve_precision(self.precision, embeddings)

        def lists_of(given: Tensor) -> tuple[LabelLists, Tensor]:
            lists = LabelLists.build(given, own_is_ranked=self.own_is_ranked)
            return lists, lists.num_relevant.amax()[None]

        def loss_of(leaf: Tensor, lists: LabelLists, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
            door = fused_door(lists, leaf.device, precision, unit_rows=self.normalize, width=widths[0])
            return self._by_door(door, lists.num_relevant, self.prepared(leaf))

        labels = labels.to(embeddings.device, torch.long, non_blocking=True)
        steps = Steps((len(embeddings),), lists_of, loss_of)
        return self._replayed(embeddings, labels, steps, self.normalize, self.own_is_ranked, precision)

    def _replayed(self, leaf: Tensor, given: Tensor, steps: "Steps", *differs: Any) -> Tensor | None:
        """The loss of `leaf` by graphs that were captured with the settings of now and what else `differs`."""
        settings = (self.ranker, self.objective, self.reduction, self.empty_query, *differs)
        replayed = self._replays(settings, leaf, (given,), steps)
        if replayed is None:
            return None
        self.used_queries = replayed[1].clone()
        return replayed[0]

    def _by_door(self, door: Any, num_relevant: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the used queries, without waiting for anything."""
        used, unit = self._shares(num_relevant, tensor)
        return self._reduce(rank_losses(Plan(door, self.ranker, self.objective, unit), tensor), unit), used

    def from_scores(self, scores: Tensor, relevance: Tensor, *, candidates: Tensor | None = None) -> Tensor:
        """Loss of ready scores [Q, n], or of one list [n], higher is nearer. The query itself must not be among them.

        Args:
            scores: floating-point scores.
            relevance: of the same shape; bool, or graded with numbers of at least 0, relevant where above 0.
            candidates: bool of the same shape, False for scores that are not ranked at all.
        """
        self._check_scores(scores, relevance, candidates)
        if scores.ndim == 1:
            scores, relevance = scores[None], relevance[None]
            candidates = None if candidates is None else candidates[None]
        if candidates is None and self.has_steps(scores, *scores.shape):
            steps = self.score_steps(len(scores))
            captured = self._replayed(scores, relevance, steps)
            if captured is None:
                captured, self.used_queries = steps.run(scores, (relevance,))
            return captured
        backend = resolve(self.backend, scores, self.ranker, caller=self.name, given=(scores.shape[0], scores.shape[1]))
        lists = ScoreLists.build(relevance, candidates)
        unit = self._count_queries(lists.num_relevant, scores)
        if backend == "reference":
            losses = reference.rank_losses(scores.double(), relevance, candidates, self.ranker, self.objective, unit)
            return self._reduce(losses, unit)
        return self._run(score_door(lists, backend), unit, scores)

    def has_steps(self, like: Tensor, queries: int, length: int) -> bool:
        """Whether `score_steps` can run for lists of scores like these, so short that launches cost more than work."""
        if not self._may_capture(like):
            return False
        if resolve(self.backend, like, self.ranker, caller=self.name, given=(queries, length)) != "triton":
            return False
        from rankgrad.ops.triton.scores import MOST_CAPTURED

        return queries * length <= MOST_CAPTURED

    def score_steps(self, queries: int) -> "Steps":
        """The loss of lists of scores from relevance and scores, in `Steps` that never wait for the device."""
        from rankgrad.ops.cuda_graphs import Steps
        from rankgrad.ops.triton.scores import Counted

        def lists_of(relevance: Tensor) -> tuple[Counted, Tensor]:
            lists = Counted.of(relevance)
            return lists, lists.num_relevant.amax()[None]

        def loss_of(leaf: Tensor, lists: Counted, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
            return self._by_door(lists.door(widths[0]), lists.num_relevant, leaf)

        return Steps((queries,), lists_of, loss_of)

    def _run(self, door: Any, unit: Tensor, *tensors: Tensor) -> Tensor:
        draws = isinstance(self.ranker, Blackbox) and self.ranker.margin_noise
        seed = int(torch.randint(2**40, ())) if draws else 0
        return self._reduce(rank_losses(Plan(door, self.ranker, self.objective, unit, seed), *tensors), unit)

    def _count_queries(self, num_relevant: Tensor, like: Tensor) -> Tensor:
        """Notes the queries that have something to find and returns the share of one query in the loss."""
        self.used_queries, unit = self._shares(num_relevant, like)
        if self.empty_query == "error" and (empty := len(num_relevant) - int(self.used_queries)):
            raise ValueError(
                f"{self.name}: empty_query='error' and {empty} of {len(num_relevant)} queries have no relevant candidate"
            )
        return unit

    def _shares(self, num_relevant: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        used = (num_relevant > 0).sum()
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.reduction == "none":
            return used, torch.ones((), dtype=dtype, device=like.device)
        if self.empty_query == "zero":
            return used, torch.full((), 1 / len(num_relevant), dtype=dtype, device=like.device)
        return used, used.clamp(min=1).to(like.device, dtype, non_blocking=True).reciprocal()

    def _reduce(self, losses: Tensor, unit: Tensor) -> Tensor:
        return losses if self.reduction == "none" else losses.sum() * unit

    def _check_embeddings(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        self_index: Tensor | None,
    ) -> None:
        check_embeddings(embeddings, name="embeddings", caller=self.name)
        check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller=self.name)
        if (ref_emb is None) != (ref_labels is None):
            given, missing = ("ref_emb", "ref_labels") if ref_labels is None else ("ref_labels", "ref_emb")
            raise ValueError(f"{self.name}: ref_emb and ref_labels go together, got {given} and no {missing}")
        if ref_emb is None:
            if self_index is not None:
                raise ValueError(f"{self.name}: self_index needs ref_emb; without it query i is candidate i")
        else:
            check_embeddings(ref_emb, name="ref_emb", caller=self.name)
            check_labels(ref_labels, items=len(ref_emb), of="ref_emb", name="ref_labels", caller=self.name)
            if ref_emb.shape[1] != embeddings.shape[1]:
                wanted, came = embeddings.shape[1], ref_emb.shape[1]
                raise ValueError(f"{self.name}: ref_emb must have the {wanted} dimensions of embeddings, got {came}")
            if ref_emb.device != embeddings.device:
                raise ValueError(f"{self.name}: ref_emb must be on {embeddings.device} like embeddings, got {ref_emb.device}")
            if self_index is not None:
                check_labels(self_index, items=len(embeddings), of="embeddings", name="self_index", caller=self.name)
        if self.validate:
            check_finite(embeddings, name="embeddings", caller=self.name)
            if ref_emb is not None:
                check_finite(ref_emb, name="ref_emb", caller=self.name)
            if self_index is not None and ref_emb is not None and bool((self_index >= len(ref_emb)).any()):
                raise ValueError(f"{self.name}: self_index must be below {len(ref_emb)}, got {int(self_index.max())}")

    def _check_scores(self, scores: Tensor, relevance: Tensor, candidates: Tensor | None) -> None:
        caller = f"{self.name}.from_scores"
        check_tensor(scores, name="scores", caller=caller)
        check_floating(scores, name="scores", caller=caller)
        if scores.ndim not in (1, 2) or not scores.numel():
            raise ValueError(
                f"{caller}: scores must be [queries, candidates] or [candidates] and not empty, got {shape_of(scores)}"
            )
        check_tensor(relevance, name="relevance", caller=caller)
        if relevance.is_complex():
            raise TypeError(f"{caller}: relevance must be bool, integer or floating point, got {relevance.dtype}")
        if relevance.shape != scores.shape:
            raise ValueError(f"{caller}: relevance must have the shape of scores {shape_of(scores)}, got {shape_of(relevance)}")
        if relevance.device != scores.device:
            raise ValueError(f"{caller}: relevance must be on {scores.device} like scores, got {relevance.device}")
        if candidates is not None:
            check_tensor(candidates, name="candidates", caller=caller)
            if candidates.dtype != torch.bool or candidates.shape != scores.shape:
                got = f"{candidates.dtype} of shape {shape_of(candidates)}"
                raise ValueError(f"{caller}: candidates must be bool of shape {shape_of(scores)}, got {got}")
        if self.validate:
            check_finite(scores, name="scores", caller=caller)
            check_finite(relevance, name="relevance", caller=caller)
            if bool((relevance < 0).any()):
                raise ValueError(f"{caller}: relevance must be at least 0, got {relevance.min().item()}")


def _mixed_rows(rows: Tensor, mixture: Mixture) -> Tensor:
    first, second, alpha = mixture
    return torch.lerp(rows[second], rows[first], alpha[:, None].to(rows))


def _widened(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
