"""Each bad input is a ValueError or TypeError that names the argument and says what came."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

import rankgrad
from rankgrad import Exact, RankLoss
from rankgrad.ops import functional

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
SCORES = X[:3]
RELEVANCE = SCORES > 0.5


def loss(**options) -> RankLoss:
    return RankLoss(rankgrad.Sigmoid(0.1), rankgrad.AveragePrecision(), **options)


def call(*args, **kwargs):
    return lambda: loss()(*args, **kwargs)


def scored(*args, **kwargs):
    return lambda: loss().from_scores(*args, **kwargs)


def with_value(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = value
    return x


NONFINITE = "nan|NaN|finite"

# what is called, the exception, the argument's name, what the message says came
SETTINGS = {
    "tau zero": (lambda: rankgrad.Sigmoid(0), ValueError, "tau", "0"),
    "tau negative": (lambda: rankgrad.Sigmoid(-0.5), ValueError, "tau", "-0.5"),
    "tau nan": (lambda: rankgrad.Sigmoid(math.nan), ValueError, "tau", "nan"),
    "tau infinite": (lambda: rankgrad.Sigmoid(math.inf), ValueError, "tau", "inf"),
    "tau a string": (lambda: rankgrad.Sigmoid("0.1"), TypeError, "tau", "0.1|str"),
    "bound tau zero": (lambda: rankgrad.UpperBound(0), ValueError, "tau", "0"),
    "bound slope negative": (lambda: rankgrad.UpperBound(rho=-1.0), ValueError, "rho", "-1"),
    "bound delta nan": (lambda: rankgrad.SupAPLoss(delta=math.nan), ValueError, "delta", "nan"),
    "lam zero": (lambda: rankgrad.Blackbox(0.0), ValueError, "lam", "0"),
    "lam negative": (lambda: rankgrad.Blackbox(-2.0), ValueError, "lam", "-2"),
    "lam nan": (lambda: rankgrad.Blackbox(math.nan), ValueError, "lam", "nan"),
    "margin negative": (lambda: rankgrad.Blackbox(1.0, margin=-0.1), ValueError, "margin", "-0.1"),
    "margin nan": (lambda: rankgrad.Blackbox(1.0, margin=math.nan), ValueError, "margin", "nan"),
    "bins zero": (lambda: rankgrad.Histogram(0), ValueError, "bins", "0"),
    "bins fractional": (lambda: rankgrad.Histogram(2.5), TypeError, "bins", "2.5|float"),
    "range reversed": (lambda: rankgrad.Histogram(5, low=1.0, high=-1.0), ValueError, "low|high", "-1"),
    "ks zero": (lambda: rankgrad.RecallAtK((0, 1)), ValueError, "ks", "0"),
    "ks negative": (lambda: rankgrad.RecallAtK((1, -4)), ValueError, "ks", "-4"),
    "ks fractional": (lambda: rankgrad.RecallAtK((1, 2.5)), TypeError, "ks", "2.5|float"),
    "ks empty": (lambda: rankgrad.RecallAtK(()), ValueError, "ks", r"\(\)|empty|0|none"),
    "ks not a sequence": (lambda: rankgrad.RecallAtK(4), (TypeError, ValueError), "ks", "4|int"),
    "cut temperature": (lambda: rankgrad.RecallAtK((1,), tau=0.0), ValueError, "tau", "0"),
    "k zero": (lambda: rankgrad.PrecisionAtK(0), ValueError, "k", "0"),
    "k fractional": (lambda: rankgrad.PrecisionAtK(1.5), TypeError, "k", "1.5|float"),
    "precision temperature": (lambda: rankgrad.PrecisionAtK(1, tau=-1.0), ValueError, "tau", "-1"),
    "weights empty": (lambda: rankgrad.WeightedRecall([]), ValueError, "weights", r"\[\]|\(\)|empty|0|none"),
    "weights nan": (lambda: rankgrad.WeightedRecall([1.0, math.nan]), ValueError, "weights", "nan"),
    "ranker a string": (lambda: RankLoss("sigmoid", rankgrad.NDCG()), TypeError, "ranker", "sigmoid|str"),
    "objective a string": (lambda: RankLoss(rankgrad.Exact(), "ap"), TypeError, "objective", "ap|str"),
    "arguments swapped": (lambda: RankLoss(rankgrad.NDCG(), rankgrad.Exact()), TypeError, "ranker", "NDCG"),
    "reduction": (lambda: loss(reduction="median"), ValueError, "reduction", "median"),
    "empty_query": (lambda: loss(empty_query="drop"), ValueError, "empty_query", "drop"),
    "backend": (lambda: loss(backend="abacus"), ValueError, "backend", "abacus"),
    "fastap bins": (lambda: rankgrad.FastAPLoss(num_bins=0), ValueError, "num_bins", "0"),
    "rambo weighting": (lambda: rankgrad.RamboRecallLoss(weighting="linear"), ValueError, "weighting", "linear"),
    "rambo lam": (lambda: rankgrad.RamboRecallLoss(lam=0.0), ValueError, "lam", "0"),
    "rambo margin": (lambda: rankgrad.RamboAPLoss(margin=-1.0), ValueError, "margin", "-1"),
    "rs tau_rank": (lambda: rankgrad.RecallAtKLoss(tau_rank=0.0), ValueError, "tau_rank", "0"),
    "rs tau_cut": (lambda: rankgrad.RecallAtKLoss(tau_cut=-3.0), ValueError, "tau_cut", "-3"),
    "rs ks": (lambda: rankgrad.RecallAtKLoss(ks=(0,)), ValueError, "ks", "0"),
    "smooth ap tau": (lambda: rankgrad.SmoothAPLoss(tau=0.0), ValueError, "tau", "0"),
    "memory size": (lambda: rankgrad.EmbeddingMemory(loss(), -1), ValueError, "size", "-1"),
    "memory size fractional": (lambda: rankgrad.EmbeddingMemory(loss(), 1.5), TypeError, "size", "1.5|float"),
    "memory of no loss": (lambda: rankgrad.EmbeddingMemory("fastap", 2), TypeError, "loss", "fastap|str"),
    "score memory size": (lambda: rankgrad.ScoreMemory(loss(), -3), ValueError, "size", "-3"),
    "simix of no loss": (lambda: rankgrad.SiMix(3.0), TypeError, "loss", "3.0|float"),
    "interclass": (lambda: rankgrad.MulticlassRankLoss(interclass=1.5), ValueError, "interclass", "1.5"),
    "multiclass memory": (lambda: rankgrad.MulticlassRankLoss(memory=-1), ValueError, "memory|size", "-1"),
}

EMBEDDINGS = {
    "a vector": (call(X[0], LABELS), ValueError, "embeddings", r"\(4,\)|\[4\]"),
    "a cube": (call(X[None], LABELS), ValueError, "embeddings", r"\(1, 6, 4\)|\[1, 6, 4\]"),
    "integers": (call(X.long(), LABELS), TypeError, "embeddings", "int64"),
    "a list": (call([[1.0]], LABELS), TypeError, "embeddings", "list"),
    "no rows": (call(X[:0], LABELS[:0]), ValueError, "embeddings", r"\(0, 4\)|\[0, 4\]"),
    "no columns": (call(X[:, :0], LABELS), ValueError, "embeddings", r"\(6, 0\)|\[6, 0\]"),
    "labels too short": (call(X, LABELS[:4]), ValueError, "labels", "4"),
    "labels a matrix": (call(X, LABELS[:, None]), ValueError, "labels", r"\(6, 1\)|\[6, 1\]"),
    "labels float": (call(X, LABELS.float()), TypeError, "labels", "float32"),
    "labels soft": (call(X, torch.eye(6)), TypeError, "labels", "soft .*Mixup"),
    "labels bool": (call(X, LABELS > 0), TypeError, "labels", "bool"),
    "labels a list": (call(X, LABELS.tolist()), TypeError, "labels", "list"),
    "ref_emb alone": (call(X, LABELS, X), ValueError, "ref_labels", "None|ref_emb"),
    "ref_labels alone": (call(X, LABELS, None, LABELS), ValueError, "ref_emb", "None|ref_labels"),
    "ref_emb of another width": (call(X, LABELS, X[:, :3], LABELS), ValueError, "ref_emb", "3"),
    "ref_emb a vector": (call(X, LABELS, X[0], LABELS), ValueError, "ref_emb", r"\(4,\)|\[4\]"),
    "ref_emb empty": (call(X, LABELS, X[:0], LABELS[:0]), ValueError, "ref_emb", r"\(0, 4\)|\[0, 4\]"),
    "ref_emb elsewhere": (call(X, LABELS, X.to("meta"), LABELS), ValueError, "ref_emb", "meta"),
    "ref_labels too long": (call(X[:2], LABELS[:2], X[:3], LABELS), ValueError, "ref_labels", "6"),
    "ref_labels float": (call(X, LABELS, X, LABELS.double()), TypeError, "ref_labels", "float64"),
    "self_index too short": (
        call(X, LABELS, X, LABELS, self_index=torch.arange(2)), ValueError, "self_index", "2",
    ),
    "self_index float": (
        call(X, LABELS, X, LABELS, self_index=torch.arange(6.0)), TypeError, "self_index", "float32",
    ),
    "self_index without ref_emb": (
        call(X, LABELS, self_index=torch.arange(6)), ValueError, "self_index", "ref_emb",
    ),
}  # fmt: skip

SCORED = {
    "scores a cube": (scored(X[None], X[None] > 0), ValueError, "scores", r"\(1, 6, 4\)|\[1, 6, 4\]"),
    "scores integers": (scored(SCORES.long(), RELEVANCE), TypeError, "scores", "int64"),
    "scores a list": (scored([0.1, 0.2], torch.tensor([True, False])), TypeError, "scores", "list"),
    "scores without lists": (scored(SCORES[:0], RELEVANCE[:0]), ValueError, "scores", r"\(0, 4\)|\[0, 4\]"),
    "scores without items": (scored(SCORES[:, :0], RELEVANCE[:, :0]), ValueError, "scores", r"\(3, 0\)|\[3, 0\]"),
    "relevance of another shape": (scored(SCORES, RELEVANCE[:2]), ValueError, "relevance", r"\(2, 4\)|\[2, 4\]"),
    "relevance a vector": (scored(SCORES, RELEVANCE[0]), ValueError, "relevance", r"\(4,\)|\[4\]"),
    "relevance complex": (scored(SCORES, RELEVANCE.cfloat()), TypeError, "relevance", "complex64"),
    "relevance a list": (scored(SCORES, RELEVANCE.tolist()), TypeError, "relevance", "list"),
    "relevance elsewhere": (scored(SCORES, RELEVANCE.to("meta")), ValueError, "relevance", "meta"),
    "candidates float": (
        scored(SCORES, RELEVANCE, candidates=torch.ones(3, 4)), (TypeError, ValueError), "candidates", "float32",
    ),
    "candidates of another shape": (
        scored(SCORES, RELEVANCE, candidates=torch.ones(4, 3) > 0), ValueError, "candidates", r"\(4, 3\)|\[4, 3\]",
    ),
    "targets of another shape": (
        lambda: rankgrad.MulticlassRankLoss()(SCORES, RELEVANCE.T), ValueError, "targets", r"\(4, 3\)|\[4, 3\]",
    ),
    "multiclass vector": (
        lambda: rankgrad.MulticlassRankLoss()(SCORES[0], RELEVANCE[0]), ValueError, "scores", r"\(4,\)|\[4\]",
    ),
}  # fmt: skip

ON_CONTENTS = {
    "nan embedding": (lambda v: loss(validate=v)(with_value(X, math.nan), LABELS), "embeddings", NONFINITE),
    "infinite embedding": (lambda v: loss(validate=v)(with_value(X, math.inf), LABELS), "embeddings", "inf|finite"),
    "nan ref_emb": (
        lambda v: loss(validate=v)(X, LABELS, with_value(X, math.nan), LABELS), "ref_emb", NONFINITE,
    ),
    "nan score": (lambda v: loss(validate=v).from_scores(with_value(SCORES, math.nan), RELEVANCE), "scores", NONFINITE),
    "negative grade": (
        lambda v: loss(validate=v).from_scores(SCORES, with_value(RELEVANCE.float(), -2.0)), "relevance", "-2|negative",
    ),
    "nan grade": (
        lambda v: loss(validate=v).from_scores(SCORES, with_value(RELEVANCE.float(), math.nan)), "relevance", NONFINITE,
    ),
    "self_index out of range": (
        lambda v: loss(validate=v)(X, LABELS, X, LABELS, self_index=torch.arange(6) + 3), "self_index", "8|range",
    ),
}  # fmt: skip


def refuses(action, errors, name: str, came: str) -> None:
    with pytest.raises(errors) as caught:
        action()
    message = str(caught.value)
    assert re.search(rf"\b({name})\b", message), f"no {name!r} in {message!r}"
    rest = re.sub(rf"\b({name})\b", "", message)
    assert re.search(came, rest), f"no {came!r} in {message!r}"


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    refuses(*SETTINGS[case])


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings(case):
    refuses(*EMBEDDINGS[case])


@pytest.mark.parametrize("case", SCORED)
def test_scores(case):
    refuses(*SCORED[case])


@pytest.mark.parametrize("case", ON_CONTENTS)
def test_contents_are_checked_on_request(case):
    action, name, came = ON_CONTENTS[case]
    refuses(lambda: action(True), ValueError, name, came)


@pytest.mark.parametrize("case", [case for case in ON_CONTENTS if case != "self_index out of range"])
def test_contents_are_not_checked_unasked(case):
    ON_CONTENTS[case][0](False)


def test_good_input_passes_validation():
    checked = loss(validate=True)
    checked(X, LABELS)
    checked(X, LABELS, X, LABELS, self_index=torch.tensor([0, 1, 2, -1, -1, 5]))
    checked.from_scores(SCORES, RELEVANCE.long() * 3, candidates=torch.ones_like(RELEVANCE))


def test_a_gpu_without_kernels_runs_tiled_and_refuses_a_request_for_them(monkeypatch):
    pytest.importorskip("triton")

    def is_of(major, minor):
        properties = SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=2**16)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    is_of(7, 5)
    on_a_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32)
    assert functional.resolve("auto", on_a_gpu, Exact(), caller="RankLoss") == "tiled"
    with pytest.raises(RuntimeError, match=r"the kernels need compute capability 8\.0, and this GPU has 7\.5; use"):
        functional.resolve("triton", on_a_gpu, Exact(), caller="RankLoss")
    is_of(8, 6)
    assert functional.resolve("auto", on_a_gpu, Exact(), caller="RankLoss") == "triton"
