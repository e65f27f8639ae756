"""Train on the metric you report: rank-based losses for retrieval, with batches as large as the metric needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankgrad.eval import Result, evaluate, evaluate_scores
from rankgrad.losses.average_precision import (
    AveragePrecision,
    AveragePrecisionAtR,
    FastAPLoss,
    HierarchicalAveragePrecision,
    RamboAPLoss,
    SmoothAPLoss,
    SupAPLoss,
)
from rankgrad.losses.calibration import CalibratedRankLoss, PairCalibration, ProxyAnchor, ProxySoftmax
from rankgrad.losses.compile_ahead import compile_kernels
from rankgrad.losses.distributed import DistributedRankLoss
from rankgrad.losses.memory import EmbeddingMemory, ScoreMemory
from rankgrad.losses.multiclass import MulticlassRankLoss
from rankgrad.losses.ndcg import NDCG, ApproxNDCGLoss, ReciprocalRank
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.recall import (
    LogLogRecall,
    LogRecall,
    PrecisionAtK,
    RamboRecallLoss,
    RecallAtK,
    RecallAtKLoss,
    RPrecision,
    WeightedRecall,
)
from rankgrad.losses.simix import SiMix
from rankgrad.losses.two_towers import both_ways
from rankgrad.ops.autograd import Ranks
from rankgrad.ops.exact_rankers import Blackbox, Exact
from rankgrad.ops.histogram_ranker import Histogram
from rankgrad.ops.levels import Levels
from rankgrad.ops.pairs import Pairs
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound
from rankgrad.train.large_batch import LargeBatch
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

if TYPE_CHECKING:
    import torch

    from rankgrad.search.trained_model import TrainedModel

__version__ = "0.1.0"

__all__ = [
    "NDCG",
    "ApproxNDCGLoss",
    "AveragePrecision",
    "AveragePrecisionAtR",
    "Blackbox",
    "CalibratedRankLoss",
    "DistributedRankLoss",
    "EmbeddingMemory",
    "Exact",
    "FastAPLoss",
    "HierarchicalAveragePrecision",
    "Histogram",
    "LargeBatch",
    "Levels",
    "LogLogRecall",
    "LogRecall",
    "MulticlassRankLoss",
    "PairCalibration",
    "Pairs",
    "PrecisionAtK",
    "ProxyAnchor",
    "ProxySoftmax",
    "RPrecision",
    "RamboAPLoss",
    "RamboRecallLoss",
    "RankLoss",
    "Ranks",
    "RecallAtK",
    "RecallAtKLoss",
    "ReciprocalRank",
    "Result",
    "ScoreMemory",
    "SiMix",
    "Sigmoid",
    "SmoothAPLoss",
    "SupAPLoss",
    "TrainSettings",
    "UpperBound",
    "WeightedRecall",
    "both_ways",
    "compile_kernels",
    "evaluate",
    "evaluate_scores",
    "fit",
    "load",
]


def load(
    path: str | Path,
    device: "torch.device | str" = "auto",
    checkpoint: Literal["best", "last"] | None = None,
    *,
    trust_code: bool = False,
) -> "TrainedModel":
    """Load the model of a run folder, to embed and search images with it.

        model = rg.load("runs/pets")
        model.embed("cat.jpg")                             # [d], of length 1; lists, arrays, tensors and folders work, too
        model.search("cat.jpg", "photos-embedded", k=5)    # the five nearest: row, score, label, path

    Args:
        path: the folder that `rankgrad train` wrote.
        device: where to compute; "auto" is a GPU where there is one.
        checkpoint: "best" or "last"; by default the best where there is one.
        trust_code: allow the run to name a function of yours as its trunk (`package.module:factory`), which is imported and
            called.
    """
    from rankgrad.search import trained_model

    return trained_model.load(path, device, checkpoint, trust_code=trust_code)
