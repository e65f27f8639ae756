"""Both directions of retrieval between two sets of embeddings, such as images and texts."""

import torch
from torch import Tensor

from rankgrad._checks import check_embeddings, check_labels
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.compiled import CompilableLoss
from rankgrad.ops.functional import two_way_losses
from rankgrad.ops.relevance import Relevance


class TwoWayLoss(CompilableLoss):
    """Mean of `loss` over both directions; see `both_ways`."""

    used_queries: Tensor
    query_weights: Tensor

    def __init__(self, loss: RankLoss) -> None:
        super().__init__()
        if not isinstance(loss, RankLoss):
            raise TypeError(f"both_ways: loss must be a RankLoss, got {type(loss).__name__}")
        self.loss = loss

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        ids: Tensor | None = None,
        second_ids: Tensor | None = None,
        *,
        relevance: Relevance | None = None,
    ) -> Tensor:
        """Mean of the losses of `first` [Q, d] ranked against `second` [C, d] and of `second` against `first`.

        Args:
            first: [Q, d] embeddings, of images for instance.
            second: [C, d] embeddings, of texts for instance.
            ids: [Q] integers: items of the same number belong together, any number of each.
            second_ids: [C] those of `second`; by default `ids`.
            relevance: in place of ids, `Pairs` of a row of `first` and one of `second`, or `Levels` of both.
        """
        loss = self.loss
        if torch.compiler.is_compiling():
            others = {"ids": ids, "second_ids": second_ids, "relevance": relevance}
            inputs: dict[str, Tensor | None] = {"first": first, "second": second}
            return self.compiled_call("forward", inputs, others, one_value=loss.reduction == "mean")
        if (ids is None) == (relevance is None):
            raise TypeError(f"both_ways: give either ids or relevance, got {'neither' if ids is None else 'both'}")
        if relevance is None:
            second_ids = ids if second_ids is None else second_ids
            for name, given_ids, of, items in (("ids", ids, "first", first), ("second_ids", second_ids, "second", second)):
                check_embeddings(items, name=of, caller="both_ways")
                check_labels(given_ids, items=len(items), of=of, name=name, caller="both_ways")
        given = loss.checked_relevance(first, ids, second, second_ids, None, None, relevance)
        scale = loss.temperature.score_scale(loss.ranker)
        output = two_way_losses(first, second, given, loss.config, score_scale=scale, caller=loss.name)
        self.used_queries, self.query_weights = output.used_queries, output.query_weights
        return output.loss


def both_ways(loss: RankLoss) -> TwoWayLoss:
    """`loss` of two towers in both directions: image to text and text to image.

        loss = rg.both_ways(rg.SmoothAPLoss(tau=0.05))
        loss(image_embeddings, text_embeddings, ids)

    The value is (loss(a, ids, b, ids) + loss(b, ids, a, ids)) / 2. In plain torch a tile of scores is computed once for both
    directions; the fused kernels make two passes. With reduction "none" the losses of the first set come first.
    """
    return TwoWayLoss(loss)
