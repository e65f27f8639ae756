"""The kernels for long lists give what the tiled path gives, to the last integer, in Triton's interpreter or on a GPU."""

from functools import partial

import pytest
import torch
from torch import Tensor

import rankgrad
from rankgrad.ops.autograd import RankCall, rank_losses
from rankgrad.ops.masks import MaskRelevance

pytest.importorskip("triton")
fused = pytest.importorskip("rankgrad.ops.triton.scores")
kernels = pytest.importorskip("rankgrad.ops.triton.score_kernels")
lowerings = pytest.importorskip("rankgrad.ops.triton.lowerings")
bucket_tables = pytest.importorskip("rankgrad.ops.triton.bucket_tables")

# numpy, on which the interpreter runs, remarks on what is infinity on a GPU
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN or a negative number, so that a store a kernel forgets cannot pass by luck."""
    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))


def both_ways(
    ranker, scores: Tensor, relevance: Tensor, candidates: Tensor | None = None, objective=None, **options
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Losses and gradient of the kernels and of the tiled path."""
    results = []
    for backend in ("triton", "tiled"):
        x = scores.detach().requires_grad_()  # not a copy, which would not keep the strides
        loss = rankgrad.RankLoss(ranker, objective or rankgrad.AveragePrecision(), backend=backend, **options)
        value = loss.from_scores(x, relevance, candidates=candidates)
        (gradient,) = torch.autograd.grad(value.sum() * 3, x)
        results.append((value.detach(), gradient))
    return results[0], results[1]


def assert_same(kernels: tuple[Tensor, ...], tiled: tuple[Tensor, ...]) -> None:
    for ours, wanted in zip(kernels, tiled, strict=True):
        assert torch.equal(ours, wanted), f"{(ours != wanted).sum()} of {wanted.numel()} differ"


def assert_same_but_for_padding(padded: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """A sum over a padded list may be rounded in another way."""
    torch.testing.assert_close(padded[0], exact[0], rtol=1e-6, atol=1e-6)
    assert_same(padded[1:], exact[1:])


def batch(rows: int, n: int, share: float, kind: str = "normal", seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    relevance = torch.rand(rows, n, generator=rng) < share
    scores = torch.randn(rows, n, generator=rng) + relevance
    if kind == "grid":
        scores = (scores * 4).round() / 4
    elif kind == "one value":
        scores = torch.full_like(scores, 0.3)
    elif kind == "heavy":
        scores = (3 * scores).exp()
    elif kind == "infinite":
        where = torch.rand(rows, n, generator=rng)
        scores = scores.masked_fill(where < 0.02, torch.inf).masked_fill((where > 0.97) & ~relevance, -torch.inf)
    elif kind == "huge":
        scores = scores.clamp(-1, 1) * 3e38
    return scores.to(DEVICE), relevance.to(DEVICE)


@pytest.mark.parametrize("kind", ["normal", "grid", "one value", "heavy", "infinite", "huge"])
@pytest.mark.parametrize(("n", "share"), [(1, 1.0), (700, 0.02), (2500, 0.3)])
def test_one_list(kind, n, share):
    scores, relevance = batch(1, n, share, kind)
    kernels, tiled = both_ways(rankgrad.Blackbox(0.7), scores[0], relevance[0])
    assert_same(kernels, tiled)
    if n > 1 and kind in ("normal", "grid"):
        assert kernels[1].count_nonzero() > 0


@pytest.mark.parametrize("kind", ["normal", "grid", "one value", "heavy", "infinite"])
def test_a_table_of_several_blocks(monkeypatch, kind):
    monkeypatch.setattr(bucket_tables, "BLOCK", 64)
    scores, relevance = batch(2, 2500, 0.1, kind, seed=7)
    assert_same(*both_ways(rankgrad.Blackbox(0.7), scores, relevance))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ragged_lists_with_gaps(dtype):
    """Rows with 0 to many relevant items, some candidates not ranked, scores strided in either dimension."""
    scores, relevance = batch(5, 1300, 0.1, "grid", seed=1)
    relevance &= (
        torch.rand(5, 1300, generator=torch.Generator().manual_seed(2)).to(DEVICE) < torch.arange(5, device=DEVICE)[:, None] / 4
    )
    candidates = torch.rand(5, 1300, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.8
    by_columns = scores.to(dtype).t().contiguous().t()
    part_of_wider = torch.cat((scores, scores), dim=1).to(dtype)[:, :1300]
    for ranker, given in ((rankgrad.Blackbox(2.0, margin=0.25), part_of_wider), (rankgrad.Exact(), by_columns)):
        kernels, tiled = both_ways(ranker, given, relevance, candidates, reduction="none")
        if dtype == torch.bfloat16:  # the interpreter does not round to the nearest
            torch.testing.assert_close(kernels, tiled, rtol=2**-7, atol=0)
        else:
            assert_same(kernels, tiled)


def test_graded_relevance_and_another_objective():
    scores, relevance = batch(2, 900, 0.1)
    grades = relevance * torch.randint(1, 4, relevance.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kernels, tiled = both_ways(rankgrad.Blackbox(5.0), scores, grades, objective=rankgrad.NDCG())
    assert_same(kernels, tiled)


def test_agrees_with_the_definition():
    scores, relevance = batch(2, 400, 0.1, "grid", seed=4)
    x, y = scores.clone().requires_grad_(), scores.double().requires_grad_()
    ours = rankgrad.RamboAPLoss(lam=3.1731, backend="triton").from_scores(x, relevance)
    wanted = rankgrad.RamboAPLoss(lam=3.1731, backend="reference").from_scores(y, relevance)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x)[0].double(), torch.autograd.grad(wanted, y)[0], rtol=1e-6, atol=1e-9
    )


def test_nothing_relevant():
    scores, relevance = batch(1, 50, 0.0)
    (value, gradient), _ = both_ways(rankgrad.Blackbox(1.0), scores, relevance)
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("rows", [1, 3])
def test_columns_without_waiting_for_their_number(rows):
    scores, relevance = batch(rows, 2500, 0.04, "grid", seed=5)
    relevance[0, 1024:] = False
    grades = relevance * 2.0
    lists = fused.CountedMask.of(grades)
    exact = MaskRelevance.build(grades, None)
    found, listed = lists.listed(scores, 160)
    for row in range(rows):
        begin, count = int(exact.first[row]) if rows > 1 else 0, int(relevance[row].sum())
        assert torch.equal(found.column[row * 160 :][:count], exact.column[begin:][:count])
        assert torch.equal(listed.scores[row, :count], scores[row, relevance[row]])
        assert (listed.scores[row, count:] == torch.inf).all()
        assert torch.equal(listed.valid[row], torch.arange(160, device=DEVICE) < count)
    unit = torch.ones((), device=DEVICE)
    results = []
    ops = lowerings.lowering_of(rankgrad.Blackbox(3.0), given_scores=True)
    padded = partial(fused.FusedGivenScores, relevance=found, listed=listed)
    for source in (padded, partial(fused.FusedGivenScores, relevance=exact)):
        x = scores.clone().requires_grad_()
        losses = rank_losses(RankCall(source, ops, rankgrad.AveragePrecision(), unit), x)
        results.append((losses.detach(), torch.autograd.grad(losses.sum(), x)[0]))
    assert_same_but_for_padding(*results)


def test_too_narrow_a_padding_harms_nothing_else():
    """It is noticed only after the kernels have run; the result is then thrown away."""
    scores, relevance = batch(3, 2500, 0.04)
    found, listed = fused.CountedMask.of(relevance).listed(scores, 8)
    assert torch.equal(found.column.view(3, 8), torch.stack([row.nonzero()[:8, 0] for row in relevance]))
    assert torch.equal(listed.scores, torch.stack([row[marked][:8] for row, marked in zip(scores, relevance, strict=True)]))
    assert torch.equal(found.num_relevant, relevance.sum(dim=1))


def test_too_narrow_a_padding_is_neither_read_nor_written_beyond():
    many, width, n = 20, 8, 100
    row, count = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.tensor([many], device=DEVICE)
    # what lies beyond a row's end is another list's
    columns, d_positives = torch.arange(many, device=DEVICE), torch.ones(many, device=DEVICE)
    gradient = torch.zeros(n, device=DEVICE)
    kernels.positive_grad_kernel[(1,)](d_positives, columns, count, row, row, gradient, n, width, 1, BLOCK=32)
    assert gradient.nonzero().view(-1).tolist() == list(range(width))
    # and so is what lies before
    held = torch.tensor([1e30] * many + [0.1 * (width - place) for place in range(width)], device=DEVICE)
    bucket_map, begin = torch.zeros(2, device=DEVICE), torch.zeros(17, dtype=torch.int32, device=DEVICE)
    kernels.table_kernel[(1,)](held[many:], count, row, bucket_map, begin, width, 16, 4, 1, MAKE_MAP=True, BLOCK=32)
    assert bucket_map[0] == held[many]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graphs_give_the_same(reduction):
    plain, captured = (rankgrad.RamboAPLoss(backend="triton", cuda_graphs=on, reduction=reduction) for on in (False, True))
    for seed, share in enumerate((0.02, 0.02, 0.021, 0.05, 0.0, 0.01)):  # the padding grows on the way
        scores, relevance = batch(3, 9000, share, seed=seed)
        results = []
        for loss in (plain, captured):
            x = scores.clone().requires_grad_()
            value = loss.from_scores(x, relevance)
            results.append((value.detach(), torch.autograd.grad(3 * value.sum(), x)[0]))
        # what comes back multiplies at the end, and sums over padding may be rounded in another way
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6 * float(results[1][1].abs().max()))
        assert torch.equal(plain.used_queries, captured.used_queries)
    del value  # its gradient may be asked for no more
    assert any(free for free in captured._graphs.free.values())


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_pending_calls_do_not_share_a_graph():
    loss, plain = rankgrad.RamboAPLoss(backend="triton"), rankgrad.RamboAPLoss(backend="triton", cuda_graphs=False)
    leaves, values, wanted = [], [], []
    for seed in range(5):
        scores, relevance = batch(1, 9000, 0.02, seed=seed)
        leaves.append(scores.clone().requires_grad_())
        values.append(loss.from_scores(leaves[-1], relevance))
        x = scores.clone().requires_grad_()
        wanted.append(torch.autograd.grad(plain.from_scores(x, relevance), x)[0])
    for x, value, expected in reversed(list(zip(leaves, values, wanted, strict=True))):
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected, rtol=1e-6, atol=1e-12)


def test_what_has_no_kernel_is_refused():
    scores, relevance = batch(1, 50, 0.2)
    for ranker, name in (
        (rankgrad.Sigmoid(0.1), "Sigmoid"),
        (rankgrad.Blackbox(1.0, 0.1, margin_noise=True), "margin_noise=True"),
    ):
        loss = rankgrad.RankLoss(ranker, rankgrad.AveragePrecision(), backend="triton")
        with pytest.raises(RuntimeError, match=f"RankLoss: backend='triton' cannot run here: there is no kernel for .*{name}"):
            loss.from_scores(scores, relevance)
    with pytest.raises(RuntimeError, match=r"the kernels compute in float32, and the scores are torch\.float64"):
        rankgrad.RamboAPLoss(backend="triton").from_scores(scores.double(), relevance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_backward_pass_gives_the_same_gradient(dtype):
    scores, relevance = (tensor.to(DEVICE) for tensor in batch(2, 70, 0.2))
    x = scores.to(dtype).requires_grad_()
    loss = rankgrad.RankLoss(rankgrad.Blackbox(2.0), rankgrad.AveragePrecision(), backend="triton", cuda_graphs=False)
    value = loss.from_scores(x, relevance)
    first, second = (torch.autograd.grad(value, x, retain_graph=True)[0].clone() for _ in range(2))
    assert first.any()
    assert torch.equal(first, second)
