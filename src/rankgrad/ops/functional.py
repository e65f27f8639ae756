"""Losses of embeddings and of given scores: the one-tile case and CUDA graphs live here and nowhere else.

embedding_losses   queries against candidates, both as embeddings
two_way_losses     the mean of that and of the candidates against the queries
score_losses       lists of ready scores
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rankgrad._device import on_its_device
from rankgrad._dry_run import launch_instead
from rankgrad._gpu import has_gpu
from rankgrad.ops import reference
from rankgrad.ops.autograd import RankCall, RankOps, ScoreSource, rank_losses, reduced
from rankgrad.ops.backends import lowering_for, resolve, resolve_precision
from rankgrad.ops.cuda_graphs import EMBEDDING_BYTES, GraphCache, GraphProgram, is_capturable
from rankgrad.ops.embedding_inputs import EmbeddingInputs, Mixture, prepared, scaled
from rankgrad.ops.loss_config import LossConfig, LossOutput, Queries, Shares, is_wide
from rankgrad.ops.masks import Mask, MaskRelevance
from rankgrad.ops.relevance import EngineRelevance, RelevanceInput
from rankgrad.ops.sources import EmbeddingScores, GivenScores, OneTileScores, TwoWayScores
from rankgrad.ops.tile_layout import TileLayout, is_one_tile
from rankgrad.ops.tile_rows import DenseRows, MixedRows, TileRows

if TYPE_CHECKING:
    from rankgrad.ops.triton.lowering import Lowering
    from rankgrad.ops.triton.scores import ListedPositives


@on_its_device
def embedding_losses(
    queries: Tensor,
    candidates: Tensor | None,
    relevance: RelevanceInput,
    config: LossConfig,
    *,
    weights: Tensor | None = None,
    mixture: Mixture | None = None,
    shard: slice | None = None,
    score_scale: float | Tensor | None = None,
    graphs: GraphCache | None = None,
    caller: str,
) -> LossOutput:
    """Loss of embeddings [Q, d] against candidates [C, d], or against themselves where `candidates` is None.

    Args:
        queries: [Q, d], or the base that queries and candidates are mixed from.
        candidates: [C, d].
        relevance: of all queries.
        config: ranker, objective, reduction, backend and so on.
        weights: [Q] of the queries in the mean.
        mixture: (first, second, alpha), rank mixtures of `queries` against each other.
        shard: compute what these queries contribute to the loss of all; the shards of a batch sum up to its loss.
        score_scale: what scores are multiplied by; it gets a gradient if it is a tensor that requires one.
        graphs: where small batches on a GPU are captured.
        caller: named in errors.
    """
    if score_scale is not None:
        queries, candidates, config = scaled(queries, candidates, score_scale, config)
    compute, ranker = config.compute, config.ranker
    precision = resolve_precision(compute.precision, queries)
    capturable = relevance.capturable and candidates is None and mixture is None and shard is None
    if graphs is not None and capturable:
        captured = _replayed(queries, relevance, weights, config, precision, graphs, caller)
        if captured is not None:
            return captured
    backend = resolve(compute.backend, _widened(queries), ranker, caller=caller)
    inputs = EmbeddingInputs(queries, candidates, mixture, shard)
    everyone = None
    if shard is not None:
        everyone = Queries(relevance.build().num_relevant_in_order(), weights, shard)  # the mean is over all shards
        relevance = relevance.shard(shard)
    one_tile = is_one_tile(relevance.num_queries, relevance.num_candidates, queries.device)
    tensors = partial(inputs.tensors, compute, backend, mix=backend != "tiled" or one_tile)
    if backend == "reference":
        rows = tensors()
        scores = rows[0].double() @ rows[-1].double().t()
        dense = Mask(*relevance.to(queries.device).dense())
        return _of_scores(scores, dense, config, backend, weights, everyone, caller)
    if backend == "tiled" and one_tile:
        tile = relevance.to(queries.device).one_tile()
        everyone = everyone or Queries(tile.num_relevant, weights, none_empty=tile.none_empty)
        return _run(partial(OneTileScores, relevance=tile), ranker, config, everyone, tensors(), caller)
    built = relevance.build()
    everyone = everyone or Queries(built.num_relevant if weights is None else built.num_relevant_in_order(), weights)
    if backend == "tiled":
        open_source = _tiled_source(built, queries.device, inputs.query_mixture, mixture)
        return _run(open_source, ranker, config, everyone, tensors(), caller)
    from rankgrad.ops.triton.embeddings import EmbeddingSource

    lowering = lowering_for(ranker, given_scores=False)
    source = EmbeddingSource.of(built, queries.device, precision, normalized=compute.normalize, ops=lowering)
    will_capture = graphs is not None and capturable and is_capturable(queries) and _may_capture(queries, config)
    shape = queries.shape[1], candidates is None, shard is None, _wants_gradient(queries, candidates), will_capture
    return _run_compiled(
        frozenset((*shape, kind) for kind in source.kinds),
        lambda config: _run(source, lowering, config, everyone, tensors(), caller),
        config,
        queries.device,
        next_call=partial(relevance.to(queries.device).build, captured=True) if will_capture else None,
    )


def two_way_losses(
    first: Tensor,
    second: Tensor,
    relevance: RelevanceInput,
    config: LossConfig,
    *,
    score_scale: float | Tensor | None = None,
    caller: str,
) -> LossOutput:
    """Mean of the losses of `first` [Q, d] against `second` [C, d] and of `second` against `first`.

    Plain torch computes each tile of scores once for both. One list of losses is that of the first followed by the second.
    """
    if score_scale is not None:
        first, others, config = scaled(first, second, score_scale, config)
        assert others is not None
        second = others
    compute, ranker = config.compute, config.ranker
    backend = resolve(compute.backend, _widened(first), ranker, caller=caller)
    if backend != "tiled" or is_one_tile(len(first), len(second), first.device):
        there = embedding_losses(first, second, relevance, config, caller=caller)
        back = embedding_losses(second, first, relevance.transposed(), config, caller=caller)
        weights = torch.cat([way.query_weights.expand(len(x)) for way, x in ((there, first), (back, second))]) / 2
        none = config.reduction.kind == "none"
        loss = torch.cat((there.loss, back.loss)) if none else (there.loss + back.loss) / 2
        return LossOutput(loss, there.used_queries + back.used_queries, weights)
    rows = prepared(first, compute, backend)
    others = prepared(second, compute, backend).to(rows.dtype)
    built = relevance.build()
    ways = built, built.transposed()
    layouts = [TileLayout.of(way, rows.device) for way in ways]
    used, shares = [], []
    for way in ways:
        of_way, share = config.reduction.shares(Queries(way.num_relevant), rows, caller).nan_if_any((rows, others))
        used.append(of_way)
        shares.append(share.expand(len(way.query_order)))

    def open_source(a: Tensor, b: Tensor) -> ScoreSource:
        there, back = layouts
        return TwoWayScores(
            DenseRows(a, there.relevance.query_order), DenseRows(b, there.relevance.candidate_order), there, back
        )

    # the weights of either way, so that a blackbox step is that of a call of its own
    weights, mean = torch.cat(shares), config.reduction.kind == "mean"
    seed = int(torch.randint(2**40, ())) if ranker.draws else 0
    loss = rank_losses(RankCall(open_source, ranker, config.objective, weights, mean, seed), rows, others)
    return LossOutput(loss / 2 if mean else loss, used[0] + used[1], weights / 2)


@on_its_device
def score_losses(
    scores: Tensor,
    relevance: Mask,
    config: LossConfig,
    *,
    weights: Tensor | None = None,
    graphs: GraphCache | None = None,
    caller: str,
) -> LossOutput:
    """Loss of ready scores [Q, n], one list per row, or of one list [n]."""
    lists = (1, len(scores)) if scores.ndim == 1 else (scores.shape[0], scores.shape[1])
    inputs = (relevance.relevance,)
    if relevance.candidates is None and weights is None and _may_capture(scores, config) and launch_instead() is None:
        outputs = None if graphs is None else graphs.replay(config, scores, inputs)
        if outputs is None and (program := score_program(scores, lists, config, caller=caller)) is not None:
            outputs = None if graphs is None else graphs.run(config, scores, inputs, program)
            if outputs is None:
                return LossOutput(*program.run(scores, inputs))
        if outputs is not None:
            return LossOutput(outputs[0], *(output.clone() for output in outputs[1:]))
    backend = resolve(config.compute.backend, scores, config.ranker, caller=caller, given=lists)
    return _of_scores(scores.view(lists), relevance.view(lists), config, backend, weights, None, caller)


def score_program(like: Tensor, lists: tuple[int, int], config: LossConfig, *, caller: str) -> GraphProgram | None:
    """The loss of score lists, given as (lists, length), as a program from relevance and scores.

    None where it cannot be captured. `like` is the tensor that gets the gradient. A loss of several kinds of lists joins their
    programs.
    """
    if not _may_capture(like, config):
        return None
    if resolve(config.compute.backend, like, config.ranker, caller=caller, given=lists) != "triton":
        return None
    from rankgrad.ops.triton.scores import MOST_CAPTURED, CountedMask

    if lists[0] * lists[1] > MOST_CAPTURED:
        return None
    ops = lowering_for(config.ranker, given_scores=True)

    def build(relevance: Tensor) -> tuple[tuple[CountedMask, Queries, Shares], Tensor]:
        counted = CountedMask.of(relevance.view(lists))
        in_mean = Queries(counted.num_relevant)
        return (counted, in_mean, config.reduction.shares(in_mean, like, caller)), counted.most[None]

    def loss(leaf: Tensor, built: tuple[CountedMask, Queries, Shares], widths: Sequence[int]) -> LossOutput:
        counted, in_mean, shares = built
        scores = leaf.view(lists)
        relevance, listed = counted.listed(scores.detach(), widths[0])
        return _run_fused_scores(scores, relevance, ops, config, in_mean, scores, caller, listed=listed, shares=shares)

    return GraphProgram(lists[:1], build, loss)


def _widened(embeddings: Tensor) -> Tensor:
    """A tensor of the dtype in which they enter the scores."""
    return embeddings if is_wide(embeddings) else embeddings.new_empty(0, dtype=torch.float32)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _run_compiled(
    kinds: frozenset[Hashable],
    run: Callable[[LossConfig], LossOutput],
    config: LossConfig,
    device: torch.device,
    *,
    next_call: Callable[[], object] | None = None,
) -> LossOutput:
    """`run` by the kernels, which are compiled in parallel before the first call of a kind.

    With those of `next_call`, what the call after this one launches besides.
    """
    from rankgrad.ops.triton.first_call import StandIn, compile_together

    stand_in = StandIn.of(config.objective)
    kinds = frozenset((kind, stand_in.kind) for kind in kinds)

    def dry() -> LossOutput:
        if next_call is not None:
            next_call()
        return run(replace(config, objective=stand_in))

    if launch_instead() is not None:
        return dry()
    compile_together(kinds, dry, device)
    return run(config)


def _run(
    open_source: Callable[..., ScoreSource],
    ops: RankOps,
    config: LossConfig,
    queries: Queries,
    tensors: tuple[Tensor, ...],
    caller: str,
    *,
    ranked: Tensor | None = None,
    shares: Shares | None = None,
) -> LossOutput:
    """The loss by the autograd function; `ranked` are the scores that must not be NaN where `tensors` hold others too."""
    shares = config.reduction.shares(queries, tensors[0], caller) if shares is None else shares
    used, weights = shares.nan_if_any(tensors if ranked is None else (ranked,))
    own = weights[queries.shard] if weights.ndim and queries.shard is not None else weights
    seed = int(torch.randint(2**40, ())) if config.ranker.draws else 0
    loss = rank_losses(RankCall(open_source, ops, config.objective, own, config.reduction.kind == "mean", seed), *tensors)
    return LossOutput(loss, used, weights)


def _of_scores(
    scores: Tensor,
    relevance: Mask,
    config: LossConfig,
    backend: str,
    weights: Tensor | None,
    everyone: Queries | None,
    caller: str,
) -> LossOutput:
    """The loss of a matrix of scores; `everyone` are all queries of the mean where these are only some."""
    built = relevance.build()
    everyone = everyone or Queries(built.num_relevant, weights)
    ranked = scores if relevance.candidates is None else scores.detach().masked_fill(~relevance.candidates, 0)
    if backend == "reference":
        used, query_weights = config.reduction.shares(everyone, ranked, caller).nan_if_any((ranked,))
        own = query_weights[everyone.shard] if query_weights.ndim and everyone.shard is not None else query_weights
        losses = reference.reference_losses(
            scores.double(), relevance.relevance, relevance.candidates, config.ranker, config.objective, own
        )
        return LossOutput(reduced(losses, own, reduce=config.reduction.kind == "mean"), used, query_weights)
    if backend == "triton":
        ops = lowering_for(config.ranker, given_scores=True)
        return _run_fused_scores(scores, built, ops, config, everyone, ranked, caller)
    return _run(partial(GivenScores, relevance=built), config.ranker, config, everyone, (scores,), caller, ranked=ranked)


def _run_fused_scores(
    scores: Tensor,
    relevance: MaskRelevance,
    ops: "Lowering[Any]",
    config: LossConfig,
    everyone: Queries,
    ranked: Tensor,
    caller: str,
    *,
    listed: "ListedPositives | None" = None,
    shares: Shares | None = None,
) -> LossOutput:
    from rankgrad.ops.triton.scores import FusedGivenScores

    source = partial(FusedGivenScores, relevance=relevance, listed=listed)
    shape = scores.dtype, relevance.candidates is None, relevance.single, (relevance.width or 0).bit_length()
    return _run_compiled(
        frozenset({(ops.kind, *shape, _wants_gradient(scores))}),
        lambda config: _run(source, ops, config, everyone, (scores,), caller, ranked=ranked, shares=shares),
        config,
        scores.device,
    )


def _tiled_source(
    relevance: EngineRelevance, device: torch.device, mixture: Mixture | None, candidate_mixture: Mixture | None
) -> Callable[..., ScoreSource]:
    layout = TileLayout.of(relevance, device)

    def rows(base: Tensor, order: Tensor, mixed: Mixture | None) -> TileRows:
        return DenseRows(base, order) if mixed is None else MixedRows(base, order, *mixed)

    def open_source(queries: Tensor, candidates: Tensor | None = None) -> ScoreSource:
        on_device = layout.relevance
        query_rows = rows(queries, on_device.query_order, mixture)
        if candidates is None:
            return EmbeddingScores(query_rows, query_rows, layout)
        return EmbeddingScores(query_rows, rows(candidates, on_device.candidate_order, candidate_mixture), layout)

    return open_source


def _may_capture(leaf: Tensor, config: LossConfig) -> bool:
    return (
        config.compute.cuda_graphs
        and has_gpu(leaf.device)
        and leaf.requires_grad
        and torch.is_grad_enabled()
        and config.reduction.empty_query != "error"
        and config.ranker.differentiable
        and not (leaf.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _replayed(
    embeddings: Tensor,
    relevance: RelevanceInput,
    weights: Tensor | None,
    config: LossConfig,
    precision: Literal["fast", "high"],
    graphs: GraphCache,
    caller: str,
) -> LossOutput | None:
    """The loss of a small batch by CUDA graphs; None where it must run as usual."""
    if not is_capturable(embeddings) or not _may_capture(embeddings, config) or launch_instead() is not None:
        return None
    key = (config, precision, relevance.settings, weights is None)
    inputs = relevance.to(embeddings.device).tensors
    inputs = inputs if weights is None else (*inputs, weights.to(embeddings.device))
    outputs = graphs.replay(key, embeddings, inputs)
    if outputs is None and resolve(config.compute.backend, _widened(embeddings), config.ranker, caller=caller) == "triton":
        outputs = graphs.run(key, embeddings, inputs, _embedding_program(embeddings, relevance, weights, config, precision))
    return None if outputs is None else LossOutput(outputs[0], *(output.clone() for output in outputs[1:]))


def _embedding_program(
    embeddings: Tensor,
    relevance: RelevanceInput,
    weights: Tensor | None,
    config: LossConfig,
    precision: Literal["fast", "high"],
) -> GraphProgram:
    from rankgrad.ops.triton.embeddings import EmbeddingSource

    ops = lowering_for(config.ranker, given_scores=False)

    def build(*tensors: Tensor) -> tuple[tuple[EngineRelevance, Queries, Shares], Tensor]:
        of_queries = None if weights is None else tensors[-1]
        built = relevance.with_tensors(*tensors).build(captured=True)
        in_mean = Queries(built.num_relevant if weights is None else built.num_relevant_in_order(), of_queries)
        mean = -(built.num_relevant.sum() // -len(embeddings))  # rounded up
        shares = config.reduction.shares(in_mean, embeddings, caller="")
        return (built, in_mean, shares), torch.stack((built.num_relevant.amax(), mean))

    def loss(leaf: Tensor, made: tuple[EngineRelevance, Queries, Shares], widths: Sequence[int]) -> LossOutput:
        built, in_mean, shares = made
        normalized = config.compute.normalize
        source = EmbeddingSource.of(built, leaf.device, precision, normalized=normalized, ops=ops, widths=widths)
        rows = prepared(leaf, config.compute, "triton")
        return _run(source, ops, config, in_mean, (rows,), caller="", shares=shares)

    return GraphProgram((len(embeddings),) * 2, build, loss, row_bytes=EMBEDDING_BYTES)
