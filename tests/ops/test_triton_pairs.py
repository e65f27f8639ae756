"""The fused kernels with relevance as a list of pairs, against float64: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from ops.test_triton_embeddings import DEVICE, RANKERS, assert_as_good_as_float32, passes, poison, run
from torch import Tensor

import rankgrad as rg
from rankgrad.ops import relevance

__all__ = ["poison"]  # a fixture of every test here, too

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def rows(count: int, *, seed: int = 0) -> Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def listed(matrix: Tensor, *, graded: bool = False) -> rg.Pairs:
    rng = torch.Generator().manual_seed(9)
    query, item = matrix.nonzero(as_tuple=True)
    gain = torch.randint(1, 4, (len(query),), generator=rng) if graded else None
    order = torch.randperm(len(query), generator=rng)
    pairs = [None if part is None else part[order].to(DEVICE) for part in (query, item, gain)]
    return rg.Pairs(*pairs)


def random_matrix(queries: int, candidates: int, share: float, *, seed: int = 1) -> Tensor:
    """Some rows are empty, one has six in a row."""
    matrix = torch.rand(queries, candidates, generator=torch.Generator().manual_seed(seed)) < share
    matrix[::7] = False
    matrix[3, 40:46] = True
    return matrix


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_a_batch_is_as_good_as_in_float32(ranker):
    pairs = listed(random_matrix(140, 140, 0.01).fill_diagonal_(False))
    assert_as_good_as_float32(ranker, rows(140, seed=5), relevance=pairs)


@pytest.mark.parametrize("ranker", [rg.Sigmoid(0.05), rg.Blackbox(20.0, 0.02), rg.Histogram(5)], ids=str)
def test_queries_against_a_gallery_in_groups_and_chunks(ranker, monkeypatch):
    monkeypatch.setattr(relevance, "ONE_GROUP", 0)
    monkeypatch.setattr(passes, "GRADIENT_ROWS", 128)
    monkeypatch.setattr(passes, "SCORE_COLUMNS", 128)
    queries, gallery = rows(260), rows(150, seed=2)
    matrix = torch.rand(260, 150, generator=torch.Generator().manual_seed(4)) < torch.linspace(0, 0.02, 260)[:, None]
    self_index = torch.full((260,), -1)
    self_index[20:60] = torch.arange(100, 140)
    matrix[torch.arange(20, 60), torch.arange(100, 140)] = False
    options = {"relevance": listed(matrix), "self_index": self_index.to(DEVICE)}
    assert_as_good_as_float32(ranker, queries, None, gallery, **options)


def test_the_query_in_its_own_list():
    pairs = listed(random_matrix(70, 70, 0.05).fill_diagonal_(False))
    assert_as_good_as_float32(rg.Sigmoid(0.05), rows(70), rank_self=True, relevance=pairs)


@pytest.mark.parametrize("ranker", [rg.Exact(), rg.Blackbox(20.0, 0.02), rg.Sigmoid(0.05), rg.Histogram(5)], ids=str)
def test_gains_and_ties(ranker):
    """Corners of a cube: products are exact, so that many scores tie."""
    corners = torch.randint(0, 2, (140, 4), generator=torch.Generator().manual_seed(5)).float() * 2 - 1
    pairs = listed(random_matrix(140, 140, 0.01).fill_diagonal_(False), graded=True)
    found, wanted = (
        run(rg.RankLoss(ranker, rg.NDCG(), backend=backend, precision="high"), corners.to(DEVICE), relevance=pairs)
        for backend in ("triton", "tiled")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_no_pairs_at_all():
    nothing = torch.empty(0, dtype=torch.long, device=DEVICE)
    loss = rg.RankLoss(rg.Sigmoid(0.05), rg.NDCG(), backend="triton")
    value, gradient = run(loss, rows(40), relevance=rg.Pairs(nothing, nothing))
    assert value == 0
    assert not gradient.any()
