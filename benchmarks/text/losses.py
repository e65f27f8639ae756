"""The losses that are compared: rankgrad's and sentence-transformers' own, each with two settings to choose from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as theirs
from torch import nn

import rankgrad as rg
from rankgrad.integrations.sentence_transformers import CachedRankLoss, RankLoss

OURS, THEIRS = "rankgrad", "sentence-transformers"
MINI_BATCH = 512
Columns = Literal["text", "pair", "scored pair"]


@dataclass(frozen=True)
class Loss:
    """A loss in the interface of sentence-transformers.

    Attributes:
        library: where it comes from.
        columns: "text" has a text and its intent, "pair" two texts of one intent, "scored pair" two texts and whether their
            intents are the same.
        together: how many texts of an intent are drawn together.
        settings: the loss for a model and a mini-batch (0 for none) by what is set.
    """

    library: str
    columns: Columns
    together: int
    settings: Mapping[str, Callable[[SentenceTransformer, int], nn.Module]]


def _ours(preset: Callable[..., rg.RankLoss], **options: Any) -> Callable[[SentenceTransformer, int], nn.Module]:
    def make(model: SentenceTransformer, mini_batch: int) -> nn.Module:
        loss = preset(**options)
        return CachedRankLoss(model, loss, mini_batch_size=mini_batch) if mini_batch else RankLoss(model, loss)

    return make


def _theirs(plain: Any, cached: Any = None, **options: Any) -> Callable[[SentenceTransformer, int], nn.Module]:
    def make(model: SentenceTransformer, mini_batch: int) -> nn.Module:
        found: nn.Module
        if mini_batch and cached is not None:
            found = cached(model, mini_batch_size=mini_batch, **options)
        else:
            found = plain(model, **options)
        return found

    return make


_distances = theirs.BatchHardTripletLossDistanceFunction

LOSSES: dict[str, Loss] = {
    "RecallAtKLoss": Loss(
        OURS,
        "text",
        4,
        {f"tau_rank={tau}": _ours(rg.RecallAtKLoss, tau_rank=tau) for tau in (0.01, 0.05)},
    ),
    "SmoothAPLoss": Loss(OURS, "text", 4, {f"tau={tau}": _ours(rg.SmoothAPLoss, tau=tau) for tau in (0.01, 0.05)}),
    "FastAPLoss": Loss(OURS, "text", 4, {f"num_bins={bins}": _ours(rg.FastAPLoss, num_bins=bins) for bins in (10, 20)}),
    "RamboAPLoss": Loss(
        OURS,
        "text",
        4,
        {f"margin={margin}": _ours(rg.RamboAPLoss, lam=4.0, margin=margin) for margin in (0.02, 0.1)},
    ),
    "RamboRecallLoss": Loss(
        OURS,
        "text",
        4,
        {f"margin={margin}": _ours(rg.RamboRecallLoss, lam=4.0, margin=margin) for margin in (0.02, 0.1)},
    ),
    "MultipleNegativesRankingLoss": Loss(
        THEIRS,
        "pair",
        2,
        {
            f"scale={scale}": _theirs(
                theirs.MultipleNegativesRankingLoss, theirs.CachedMultipleNegativesRankingLoss, scale=float(scale)
            )
            for scale in (20, 50)
        },
    ),
    "BatchHardSoftMarginTripletLoss": Loss(
        THEIRS,
        "text",
        4,
        {
            "Euclidean": _theirs(theirs.BatchHardSoftMarginTripletLoss),
            "cosine": _theirs(theirs.BatchHardSoftMarginTripletLoss, distance_metric=_distances.cosine_distance),
        },
    ),
    "CoSENTLoss": Loss(
        THEIRS, "scored pair", 2, {f"scale={scale}": _theirs(theirs.CoSENTLoss, scale=float(scale)) for scale in (20, 50)}
    ),
}
