"""Train on the metric you report: rank-based losses for retrieval, with batches as large as the metric needs."""

from rankgrad.eval import Result, evaluate
from rankgrad.losses.distributed import DistributedRankLoss
from rankgrad.losses.memory import EmbeddingMemory, ScoreMemory
from rankgrad.losses.multiclass import MulticlassRankLoss
from rankgrad.losses.objectives import (
    NDCG,
    AveragePrecision,
    LogLogRecall,
    LogRecall,
    PrecisionAtK,
    RecallAtK,
    ReciprocalRank,
    WeightedRecall,
)
from rankgrad.losses.presets import FastAPLoss, RamboAPLoss, RamboRecallLoss, RecallAtKLoss, SmoothAPLoss
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.simix import SiMix
from rankgrad.ops.rankers import Blackbox, Exact, Histogram, Sigmoid
from rankgrad.ops.ranks import Ranks
from rankgrad.train.large_batch import LargeBatch

__version__ = "0.1.0"

__all__ = [
    "NDCG",
    "AveragePrecision",
    "Blackbox",
    "DistributedRankLoss",
    "EmbeddingMemory",
    "Exact",
    "FastAPLoss",
    "Histogram",
    "LargeBatch",
    "LogLogRecall",
    "LogRecall",
    "MulticlassRankLoss",
    "PrecisionAtK",
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
    "WeightedRecall",
    "evaluate",
]
