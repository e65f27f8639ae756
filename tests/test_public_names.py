"""Names that others rely on. Adding one is a decision; losing one breaks somebody."""

import inspect

import pytest

import rankgrad as rg

NAMES = [
    "ApproxNDCGLoss",
    "AveragePrecision",
    "AveragePrecisionAtR",
    "RPrecision",
    "Blackbox",
    "CalibratedRankLoss",
    "PairCalibration",
    "ProxyAnchor",
    "ProxySoftmax",
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
    "NDCG",
    "Pairs",
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
    "SupAPLoss",
    "TrainSettings",
    "UpperBound",
    "WeightedRecall",
    "both_ways",
    "compile_kernels",
    "evaluate",
    "fit",
    "evaluate_scores",
    "load",
]

# positional arguments and their defaults
SIGNATURES = {
    "RecallAtKLoss": {"ks": (1, 2, 4, 8, 16), "tau_rank": 0.01, "tau_cut": 1.0},
    "SmoothAPLoss": {"tau": 0.01},
    "SupAPLoss": {"tau": 0.01, "rho": 100.0, "delta": 0.05},
    "ApproxNDCGLoss": {"tau": 0.1},
    "FastAPLoss": {"num_bins": 10},
    "RamboRecallLoss": {"lam": 4.0, "margin": 0.02, "weighting": "loglog"},
    "RamboAPLoss": {"lam": 0.5, "margin": 0.0},
    "RankLoss": {"ranker": ..., "objective": ...},
    "Sigmoid": {"tau": ...},
    "UpperBound": {"tau": 0.01, "rho": 100.0, "delta": 0.05},
    "Blackbox": {"lam": ..., "margin": 0.0, "margin_noise": False},
    "Histogram": {"bins": ..., "low": -1.0, "high": 1.0},
    "Exact": {},
    "AveragePrecision": {"k": None, "tau": 0.0},
    "AveragePrecisionAtR": {"tau": 0.0},
    "RPrecision": {"tau": 1.0},
    "RecallAtK": {"ks": ..., "tau": 1.0},
    "LogRecall": {},
    "LogLogRecall": {},
    "WeightedRecall": {"weights": ...},
    "NDCG": {"k": None, "tau": 0.0},
    "ReciprocalRank": {},
    "HierarchicalAveragePrecision": {},
    "both_ways": {"loss": ...},
    "Levels": {"labels": ..., "ref_labels": None, "gains": None},
    "Pairs": {"query": ..., "item": ..., "gain": None},
    "PrecisionAtK": {"k": ..., "tau": 1.0},
    "CalibratedRankLoss": {"loss": ..., "term": ..., "weight": 0.1},
    "ProxySoftmax": {"classes": ..., "dim": ..., "temperature": 0.05},
    "ProxyAnchor": {"classes": ..., "dim": ..., "margin": 0.1, "alpha": 32.0},
    "PairCalibration": {"alpha": 0.9, "beta": 0.6},
    "SiMix": {"loss": ..., "generator": None},
    "EmbeddingMemory": {"loss": ..., "size": ...},
    "ScoreMemory": {"loss": ..., "size": ...},
    "DistributedRankLoss": {"loss": ..., "group": None},
    "LargeBatch": {"model": ..., "loss": ..., "chunk_size": ..., "keep": "auto", "autocast": None},
    "load": {"path": ..., "device": "auto", "checkpoint": None},
    "evaluate": {"embeddings": ..., "labels": None, "ref_emb": None, "ref_labels": None},
    "evaluate_scores": {"scores": ..., "relevance": ..., "candidates": None},
    "MulticlassRankLoss": {"loss": None, "interclass": 1 / 3, "memory": 0},
}


def test_the_public_names():
    assert sorted(rg.__all__) == sorted(NAMES)
    assert all(hasattr(rg, name) for name in NAMES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments_and_defaults(name):
    parameters = inspect.signature(getattr(rg, name)).parameters.values()
    found = {p.name: ... if p.default is p.empty else p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert found == SIGNATURES[name]
