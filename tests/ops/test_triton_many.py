"""Queries with many positives, on grids or by search, against float64: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from ops.test_triton_embeddings import DEVICE, assert_as_good_as_float32, embeddings_module, error, passes, poison, run
from torch import Tensor

import rankgrad as rg
from rankgrad.ops import relevance
from rankgrad.ops.triton import grids

__all__ = ["poison"]  # a fixture of every test here, too

# a power that overflows is a sigmoid that is 0 or 1; numpy, under the interpreter, remarks on it
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of positives; the interpreter takes as long for a large block as for a small one."""
    monkeypatch.setattr(embeddings_module, "GRID_FROM", 0)
    monkeypatch.setattr(embeddings_module, "SEARCH_FROM", 0)
    if DEVICE == "cpu":
        monkeypatch.setattr(grids, "COLLECT_BLOCK", {"BC": 128, "BP": 32})
        monkeypatch.setattr(grids, "TABLE_BLOCK", {"BC": 128, "BP": 32})


def batch(sizes: list[int], *, dim: int = 12, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes of these sizes in random order, so that some queries have many positives and some none."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(len(sizes), dim, generator=generator)
    embeddings = centres[labels] + spread * torch.randn(len(labels), dim, generator=generator)
    order = torch.randperm(len(labels), generator=generator)
    return embeddings[order].to(DEVICE), labels[order].to(DEVICE)


# a cubic between the nodes of a grid is wrong by so much of the steepest slope at most
CUBIC = 2.3e-6

RANKERS = [rg.Sigmoid(0.3), rg.Exact(), rg.Blackbox(20.0, 0.02)]


@pytest.mark.parametrize("ranker", [*RANKERS, rg.Sigmoid(0.05)], ids=str)
def test_a_ragged_batch_is_as_good_as_in_float32(ranker):
    assert_as_good_as_float32(ranker, *batch([1, 1, 2, 9, 14]))


@pytest.mark.parametrize("num_candidates", [2**20, 2**23 - 1], ids=str)
def test_sums_that_have_room_for_millions_of_candidates_are_as_good_as_in_float32(monkeypatch, num_candidates):
    """The fixed point of the sums depends on how many candidates a cell may hold, not on those that are there."""
    real = grids.QueryGrids.count
    monkeypatch.setattr(grids.QueryGrids, "count", lambda self, _, *rest: real(self, num_candidates, *rest))
    assert_as_good_as_float32(rg.Sigmoid(0.05), *batch([1, 1, 2, 9, 14]))


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_groups_and_chunks_of_queries(monkeypatch, ranker):
    monkeypatch.setattr(relevance, "ONE_GROUP", 0)
    monkeypatch.setattr(grids, "MOMENT_BYTES", 0)
    monkeypatch.setattr(passes, "GRADIENT_ROWS", 128)
    assert_as_good_as_float32(ranker, *batch([1] * 118 + [2] * 5 + [9]))


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_queries_against_a_gallery_that_holds_some_of_them(ranker):
    gallery, gallery_labels = batch([3, 8, 12, 1])
    queries, labels = gallery[4:14].clone(), gallery_labels[4:14].clone()
    labels[0] = 99
    self_index = torch.arange(4, 14, device=DEVICE)
    self_index[5:] = -1
    assert_as_good_as_float32(ranker, queries, labels, gallery, gallery_labels, self_index=self_index)


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_pairs_and_the_query_in_its_own_list(ranker):
    embeddings, _ = batch([24])
    matrix = torch.rand(24, 24, generator=torch.Generator().manual_seed(1)) < 0.3
    pairs = rg.Pairs(*(part.to(DEVICE) for part in matrix.fill_diagonal_(False).nonzero(as_tuple=True)))
    assert_as_good_as_float32(ranker, embeddings, relevance=pairs, rank_self=True, interpolation=CUBIC)


def test_equal_embeddings_tie_and_far_candidates_count_whole():
    embeddings, labels = batch([10, 14])
    embeddings[::2] = embeddings[0].clone()
    embeddings[1::4] = -embeddings[0]
    assert_as_good_as_float32(rg.Sigmoid(0.03), embeddings, labels, interpolation=CUBIC)


def test_a_search_ranks_ties_as_comparisons_do(monkeypatch):
    embeddings, labels = batch([6, 9, 2])
    embeddings[::2] = embeddings[0].clone()
    loss = rg.RankLoss(rg.Blackbox(5.0), rg.AveragePrecision(), backend="triton", precision="high", cuda_graphs=False)
    searched = run(loss, embeddings, labels)
    monkeypatch.setattr(embeddings_module, "SEARCH_FROM", 1000)
    compared = run(loss, embeddings, labels)
    assert torch.equal(searched[0], compared[0])
    torch.testing.assert_close(searched[1], compared[1], rtol=1e-5, atol=1e-7)


def test_gradients_of_classes_that_are_far_apart_keep_their_digits():
    """Every sigmoid is tiny there, and all that is left of the gradient comes from their tails."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20, device=DEVICE) % 2
    centres = torch.eye(2, 8, device=DEVICE)
    embeddings = centres[labels] + 0.02 * torch.randn(20, 8, generator=generator).to(DEVICE)
    assert_as_good_as_float32(rg.Sigmoid(0.07), embeddings, labels)


def test_fast_errs_no_more_than_twice_as_much_as_float16_scores_in_torch():
    embeddings, labels = batch([1, 2, 9, 20])

    def loss(backend: str) -> rg.RankLoss:
        return rg.RankLoss(rg.Sigmoid(0.05), rg.AveragePrecision(), backend=backend, precision="fast")

    exact = run(loss("tiled"), embeddings, labels, dtype=torch.float64)
    rounded = run(loss("tiled"), torch.nn.functional.normalize(embeddings).half().float(), labels)
    fused = run(loss("triton"), embeddings, labels)
    assert torch.isclose(fused[0], exact[0], atol=1e-4, rtol=0)
    assert error(fused[1], exact[1]) <= 2 * error(rounded[1], exact[1]) + 1e-3


def test_the_same_input_gives_the_same_bits():
    loss = rg.RankLoss(rg.Sigmoid(0.2), rg.AveragePrecision(), backend="triton", precision="high", cuda_graphs=False)
    example = batch([2, 7])
    assert all(torch.equal(a, b) for a, b in zip(run(loss, *example), run(loss, *example), strict=True))


@pytest.mark.parametrize(
    ("ranker", "normalize", "from_positives", "wanted"),
    [
        (rg.Sigmoid(0.2), True, 8, True),
        (rg.Sigmoid(0.2), True, 9, False),  # few positives: 9 at most, 7.3 on average, rounded up to 8
        (rg.Sigmoid(0.2), False, 5, False),  # scores without a bound
        (rg.Sigmoid(0.001), True, 5, False),  # the grid would be too long
        (rg.UpperBound(0.2), True, 5, False),  # no grid for its line
    ],
    ids=str,
)
def test_grids_are_used_where_they_fit_and_pay_off(monkeypatch, ranker, normalize, from_positives, wanted):
    made = []
    real = grids.QueryGrids
    monkeypatch.setattr(embeddings_module, "GRID_FROM", from_positives)
    monkeypatch.setattr(embeddings_module, "QueryGrids", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    loss = rg.RankLoss(ranker, rg.AveragePrecision(), normalize=normalize, backend="triton")
    with torch.no_grad():
        loss(*batch([4, 10]))
    assert bool(made) == wanted


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("ranker", [rg.Sigmoid(0.3), rg.Blackbox(20.0, 0.02), rg.Histogram(5)], ids=str)
def test_nan_among_many_positives_is_seen(ranker, precision):
    embeddings, labels = batch([5, 9, 1])
    embeddings[labels == 1] = torch.where(torch.arange(9, device=DEVICE)[:, None] == 4, torch.nan, embeddings[labels == 1])
    loss = rg.RankLoss(ranker, rg.AveragePrecision(), backend="triton", precision=precision, cuda_graphs=False)
    value, gradient = run(loss, embeddings, labels)
    assert value.isnan()
    assert gradient.isnan().any()
