"""Train on the metric you report: rank-based losses for retrieval, with batches as large as the metric needs."""

from rankgrad.eval import Result, evaluate
from rankgrad.losses.average_precision import AveragePrecision, FastAPLoss, RamboAPLoss, SmoothAPLoss
from rankgrad.losses.distributed import DistributedRankLoss
from rankgrad.losses.memory import EmbeddingMemory, ScoreMemory
from rankgrad.losses.multiclass import MulticlassRankLoss
from rankgrad.losses.ndcg import NDCG, ReciprocalRank
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.recall import (
    LogLogRecall,
    LogRecall,
    PrecisionAtK,
    RamboRecallLoss,
    RecallAtK,
    RecallAtKLoss,
    WeightedRecall,
)
from rankgrad.losses.simix import SiMix
from rankgrad.ops.autograd import Ranks
from rankgrad.ops.rankers import Blackbox, Exact, Histogram, Sigmoid
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
