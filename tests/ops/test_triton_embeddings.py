"""The fused kernels against float64: on a GPU where there is one, else in Triton's interpreter."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import rankgrad as rg
from rankgrad._dry_run import launch_instead
from rankgrad.ops import cuda_graphs, relevance
from rankgrad.ops.autograd import RankCall, rank_losses
from rankgrad.ops.labels import IntervalRelevance, Labels
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound

pytest.importorskip("triton")
embeddings_module = pytest.importorskip("rankgrad.ops.triton.embeddings")
lowerings = pytest.importorskip("rankgrad.ops.triton.lowerings")
fused_scores = pytest.importorskip("rankgrad.ops.triton.fused_scores")
passes = pytest.importorskip("rankgrad.ops.triton.passes")
stored_scores = pytest.importorskip("rankgrad.ops.triton.stored_scores")
tiles = pytest.importorskip("rankgrad.ops.triton.tiles")

# a power that overflows is a sigmoid that is 0 or 1; numpy, under the interpreter, remarks on it
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RANKERS = [
    rg.Exact(), rg.Sigmoid(0.05), rg.Sigmoid(0.004), rg.UpperBound(0.1, 3.0, 0.2), rg.Blackbox(20.0, 0.02),
    rg.Histogram(5),
]  # fmt: skip
SMOOTH = [rg.Sigmoid(0.05), rg.UpperBound(0.05, 20.0, 0.1), rg.Histogram(5)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that a store a kernel forgets cannot pass by luck."""
    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))


def batch(items: int, classes: int, *, dim: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (items,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator)
    return (centres[labels] + torch.randn(items, dim, generator=generator)).to(DEVICE), labels.to(DEVICE)


def run(loss: rg.RankLoss, *tensors: Tensor | None, dtype: torch.dtype = torch.float32, **options: object) -> list[Tensor]:
    """Value and gradients of embeddings, labels and perhaps references, as float64."""
    leaves = [t.detach().to(dtype).requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    value = loss(*leaves, **options)
    # a gradient that ignored what follows the loss would be seen; a power of two: a captured call scales its gradient last
    (value * 4).sum().backward()
    grads = [t.grad for t in leaves if t is not None and t.is_floating_point()]
    return [t.detach().double() for t in (value, *grads)]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))


def assert_as_good_as_float32(
    ranker: object, *tensors: Tensor | None, rank_self: bool = False, interpolation: float = 0.0, **options: object
) -> None:
    """`interpolation` is the error that a gradient may have beyond that of float32."""

    def loss(backend: str) -> rg.RankLoss:
        made = rg.RankLoss(ranker, rg.AveragePrecision(), backend=backend, precision="high", cuda_graphs=False)
        made.rank_self = rank_self
        return made

    exact = run(loss("tiled"), *tensors, dtype=torch.float64, **options)
    plain = run(loss("tiled"), *tensors, **options)
    fused = run(loss("triton"), *tensors, **options)
    assert torch.isclose(fused[0], exact[0], atol=1e-5, rtol=0), (fused[0], exact[0])
    # tensor cores multiply a split in float16, which keeps 22 bits of a score; a sigmoid sees the rest in units of tau
    cut = 2**-22 / ranker.tau if DEVICE == "cuda" and isinstance(ranker, (Sigmoid, UpperBound)) else 1e-6
    for e, p, f in zip(exact[1:], plain[1:], fused[1:], strict=True):
        assert error(f, e) <= 2 * error(p, e) + cut + interpolation


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_a_batch_is_as_good_as_in_float32(ranker):
    assert_as_good_as_float32(ranker, *batch(150, 40))


@pytest.mark.parametrize("tau", [0.01, 0.0075])
def test_positives_too_far_apart_to_share_a_centre_are_counted_in_a_second_pass(tau):
    embeddings, labels = batch(150, 40)
    # the classes are opposites: some positives of a query lie near 1 and some near -1, and so do the others
    embeddings = embeddings * torch.where(torch.arange(len(labels), device=DEVICE) % 2 == 0, 1.0, -1.0)[:, None]
    unit = torch.nn.functional.normalize(embeddings)
    positive = (labels[:, None] == labels).fill_diagonal_(False)
    scores = unit @ unit.t()
    spread = scores.masked_fill(~positive, -2).amax(dim=1) - scores.masked_fill(~positive, 2).amin(dim=1)
    assert spread.amax() / tau / math.log(2) > 200 > spread[spread > 0].amin() / tau / math.log(2)
    assert_as_good_as_float32(rg.Sigmoid(tau), embeddings, labels)


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_queries_against_a_gallery_that_holds_some_of_them(ranker):
    queries, labels = batch(60, 25, seed=1)
    gallery, gallery_labels = batch(140, 25, seed=2)
    self_index = torch.full((60,), -1, device=DEVICE)
    gallery[10:40], gallery_labels[10:40], self_index[:30] = queries[:30], labels[:30], torch.arange(10, 40, device=DEVICE)
    assert_as_good_as_float32(ranker, queries, labels, gallery, gallery_labels, self_index=self_index)


@pytest.mark.parametrize("ranker", [rg.Sigmoid(0.05), rg.Blackbox(0.2, margin=0.02)], ids=str)
def test_references_that_are_relevant_to_no_query(ranker):
    """Whole blocks of them, as in a memory of other classes: compiled, an empty loop had read far outside of its tensors."""
    queries, labels = batch(32, 8, seed=1)
    references, reference_labels = batch(160, 40, seed=2)
    assert_as_good_as_float32(ranker, queries, labels, references, reference_labels)


@pytest.mark.parametrize("ranker", RANKERS, ids=str)
def test_ragged_classes_in_groups_and_chunks(ranker, monkeypatch):
    monkeypatch.setattr(relevance, "ONE_GROUP", 0)
    monkeypatch.setattr(passes, "GRADIENT_ROWS", 128)
    monkeypatch.setattr(passes, "SCORE_COLUMNS", 128)
    sizes = torch.tensor([1] * 130 + [3] * 45 + [20])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))].to(DEVICE)
    embeddings = torch.randn(len(labels), 24, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    layout = embeddings_module.QueryGroups.of(IntervalRelevance.build(labels), labels.device)
    assert len(layout.groups) == 3, layout.widths
    assert_as_good_as_float32(ranker, embeddings, labels)


@pytest.mark.parametrize("ranker", [rg.Exact(), rg.Sigmoid(0.05), rg.Histogram(5)], ids=str)
def test_a_score_of_two_passes_is_counted_for_both_of_its_queries(ranker, monkeypatch):
    monkeypatch.setattr(fused_scores, "COLUMN_BYTES", 1)
    made = []
    count = fused_scores.FusedScores._count

    def noted(self, args, index, rows, other, columns, *, both):
        launch_instead() or made.append((both, rows, columns))
        return count(self, args, index, rows, other, columns, both=both)

    monkeypatch.setattr(fused_scores.FusedScores, "_count", noted)
    assert_as_good_as_float32(ranker, *batch(200, 50))
    halves = [(True, slice(0, 128), slice(0, 200)), (True, slice(128, 200), slice(128, 200))]
    assert set(map(str, made)) == set(map(str, halves))


@pytest.mark.parametrize("precision", ["fast", "high"])
def test_splits_of_the_candidates_take_limited_memory(precision, monkeypatch):
    monkeypatch.setattr(fused_scores, "ROW_BYTES", 1)
    splits = []
    count = fused_scores.FusedScores._count

    def noted(*args, **options):
        for_rows, for_columns = count(*args, **options)
        splits.append(for_rows.shape[1])
        return for_rows, for_columns

    monkeypatch.setattr(fused_scores.FusedScores, "_count", noted)
    loss = rg.RankLoss(rg.UpperBound(0.1, 3.0, 0.2), rg.AveragePrecision(), backend="triton", precision=precision)
    embeddings, labels = batch(260, 60)
    with torch.no_grad():
        found = loss(embeddings, labels)
    assert set(splits) == {1}
    loss.backend = "reference"
    assert found.item() == pytest.approx(loss(embeddings, labels).item(), rel=1e-3)


def test_few_queries_with_many_positives_do_not_cut_all_rows_into_tiles():
    groups = [slice(0, 63872), slice(63872, 65536)]
    scores = object.__new__(fused_scores.FusedScores)
    scores.ops = lowerings.lowering_of(rg.Sigmoid(0.01), given_scores=False)
    scores.passes, scores.tile = passes.Passes(groups, 65536, 2, True), {"BM": 128, "BN": 64}
    made = []
    scores._count = lambda args, index, rows, other, columns, *, both: (made.append(rows), (torch.zeros(2, 1, 0, 0),) * 2)[1]
    scores._add = lambda sums, index, queries, parts: sums.setdefault(index, parts)
    scores.count([fused_scores.CountArgs(torch.zeros(1, 1), width) for width in (3, 1600)], both=True)
    assert made[0] == slice(0, 384)


@pytest.mark.usefixtures("ties_in_the_interpreter")
@pytest.mark.parametrize(("precision", "descriptors"), [("fast", False), ("high", False), ("high", True)])
def test_a_score_is_the_same_to_the_last_bit_whichever_of_its_items_is_the_query(precision, descriptors, monkeypatch):
    if not descriptors:
        monkeypatch.setattr(embeddings_module, "takes_descriptors", lambda device: False)
    embeddings = 7 * torch.randn(130, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layout = embeddings_module.QueryGroups.of(IntervalRelevance.build(torch.arange(130).to(DEVICE)), embeddings.device)
    source = embeddings_module.FusedEmbeddingScores(embeddings, None, layout, precision, normalized=False)
    stored = source._stored(lowerings.lowering_of(rg.Sigmoid(0.01), given_scores=False), source._passes([source.everyone]))
    scores = next(stored.blocks(0, source.everyone)).scores[:130, :130]
    assert torch.equal(scores, scores.t())


@pytest.mark.parametrize("ranker", [rg.Sigmoid(0.05), rg.Blackbox(20.0, 0.02)], ids=str)
def test_blocks_of_the_size_that_a_gpu_gets(ranker, monkeypatch):
    """Elsewhere the interpreter gets larger ones, which are faster there."""
    monkeypatch.setattr(stored_scores, "GRADIENT_TILE", tiles.GRADIENT_TILE)
    for name in ("GRID_FROM", "SEARCH_FROM"):
        monkeypatch.setattr(embeddings_module, name, 0)
    assert_as_good_as_float32(ranker, *batch(40, 12))


@pytest.mark.parametrize(("tau", "root"), [(0.02, 1), (0.01, 2), (0.005, 4), (0.002, 8), (0.001, 0)])
def test_powers_do_not_overflow_at_any_temperature(tau, root):
    source = embeddings_module.FusedEmbeddingScores._root
    ops = lowerings.lowering_of(rg.Sigmoid(tau), given_scores=False)
    assert source(SimpleNamespace(normalized=True), ops) == root
    assert source(SimpleNamespace(normalized=False), ops) == 0
    embeddings, labels = batch(40, 12)
    embeddings[::5] *= -1  # positives at either end of the scores
    assert_as_good_as_float32(rg.Sigmoid(tau), embeddings, labels)


def test_the_query_in_its_own_list():
    assert_as_good_as_float32(rg.Sigmoid(0.05), *batch(70, 20), rank_self=True)


@pytest.mark.parametrize("dim", [2, 65, 130])
def test_dimensions_that_are_no_multiple_of_a_step(dim):
    assert_as_good_as_float32(rg.Sigmoid(0.05), *batch(40, 10, dim=dim))


def test_embeddings_that_are_not_normalised_are_scaled():
    embeddings, labels = batch(50, 12)
    for factor in (1e-3, 1.0, 3e4):
        ranker = Sigmoid(0.5 * factor**2)
        values = [
            run(rg.RankLoss(ranker, rg.AveragePrecision(), normalize=False, backend=b), embeddings * factor, labels)
            for b in ("tiled", "triton")
        ]
        for plain, fused in zip(*values, strict=True):
            assert error(fused, plain) < 1e-4


@pytest.mark.parametrize("ranker", SMOOTH, ids=str)
def test_fast_errs_no_more_than_twice_as_much_as_float16_scores_in_torch(ranker):
    embeddings, labels = batch(150, 40)
    unit = torch.nn.functional.normalize(embeddings, dim=1)

    def loss(backend: str, normalize: bool) -> rg.RankLoss:
        return rg.RankLoss(ranker, rg.AveragePrecision(), normalize=normalize, backend=backend, precision="fast")

    exact = run(loss("tiled", False), unit, labels, dtype=torch.float64)
    rounded = run(loss("tiled", False), unit.half().float(), labels)
    fused = run(loss("triton", False), unit, labels)
    assert torch.isclose(fused[0], exact[0], atol=1e-4, rtol=0)
    assert error(fused[1], exact[1]) <= 2 * error(rounded[1], exact[1]) + 1e-3
    assert error(fused[1], exact[1]) > 1e-6  # it is not the other precision


@pytest.mark.usefixtures("ties_in_the_interpreter")
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_equal_embeddings_tie_whatever_their_length(precision):
    """Where positives and tiles are rounded in two ways, a tie of large scores in units of a small tau is none."""
    embeddings = 30 * torch.randn(65, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    embeddings[::3] = embeddings[0].clone()
    labels = torch.randint(8, (65,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    options = {"normalize": False, "reduction": "none", "query_in_database": True}
    exact = rg.RecallAtKLoss(backend="tiled", **options)(embeddings.double(), labels)
    fused = rg.RecallAtKLoss(backend="triton", precision=precision, **options)(embeddings, labels)
    # scores of embeddings that are not equal are rounded to 11 bits by "fast"
    torch.testing.assert_close(fused.double(), exact, rtol=0, atol=0.02 if precision == "fast" else 1e-5)


@pytest.mark.parametrize("precision", ["fast", "high"])
def test_embeddings_that_are_not_contiguous(precision):
    """Those of a transpose are not, and nothing but normalising would copy them."""
    generator = torch.Generator().manual_seed(3)
    queries, candidates = (torch.randn(5, n, generator=generator).t().to(DEVICE) for n in (12, 9))
    labels = torch.arange(12, device=DEVICE) // 3
    loss = rg.RankLoss(rg.Sigmoid(1.0), rg.AveragePrecision(), normalize=False, backend="triton", precision=precision)
    for others in ((), (candidates, labels[:9])):
        plain = run(loss, queries.contiguous(), labels, *(t.contiguous() for t in others))
        for found, expected in zip(run(loss, queries, labels, *others), plain, strict=True):
            assert torch.equal(found, expected)


def test_small_queries_against_large_candidates_in_float16():
    generator = torch.Generator().manual_seed(4)
    queries = 1e-3 * torch.randn(12, 16, generator=generator)
    candidates = 100 + 10 * torch.randn(12, 16, generator=generator)
    labels = torch.arange(12) // 3
    given = [t.to(DEVICE) for t in (queries, labels, candidates, labels)]
    options = {"normalize": False, "precision": "fast"}
    found, exact = (
        run(rg.RankLoss(rg.Sigmoid(0.1), rg.AveragePrecision(), backend=backend, **options), *given)
        for backend in ("triton", "reference")
    )
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) < 0.05


@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize(
    ("ranker", "mean"), [(rg.Sigmoid(0.05), 2), (rg.Sigmoid(0.05), 64), (rg.UpperBound(), 2), (rg.Blackbox(20.0), 2)]
)
def test_a_call_with_room_for_too_few_positives_stays_in_its_memory(ranker, mean, precision, monkeypatch):
    """A captured call finds out that classes have grown when it has run."""
    room, beyond = [], 2048

    def with_space_behind(make):
        def made(*sizes, **options):
            plain = make(*sizes, **options)
            if plain.dtype not in (torch.float32, torch.int32):
                return plain
            behind = plain.new_full((beyond,), math.nan if plain.is_floating_point() else 7)
            joined = torch.cat((plain.view(-1), behind))
            room.append((joined[plain.numel() :], behind))
            return joined[: plain.numel()].view(plain.shape)

        return made

    embeddings, _ = batch(10, 2)
    built = Labels.of(torch.arange(10, device=DEVICE) // 8).build()
    ops = lowerings.lowering_of(ranker, given_scores=False)
    source = embeddings_module.EmbeddingSource.of(
        built, embeddings.device, precision, normalized=True, ops=ops, widths=(2, mean)
    )
    rows = torch.nn.functional.normalize(embeddings).requires_grad_()
    for name in ("empty", "zeros", "full"):
        monkeypatch.setattr(torch, name, with_space_behind(getattr(torch, name)))
    rank_losses(RankCall(source, ops, rg.AveragePrecision(), torch.ones((), device=DEVICE), reduce=True), rows).backward()
    assert room
    for found, expected in room:
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert rows.grad.isfinite().all()


def test_the_same_input_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(passes, "GRADIENT_ROWS", 128)
    for ranker in (rg.Sigmoid(0.05), rg.Blackbox(20.0)):
        loss = rg.RankLoss(ranker, rg.AveragePrecision(), backend="triton", precision="fast")
        first, second = run(loss, *batch(140, 30)), run(loss, *batch(140, 30))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_lone_queries_and_a_batch_without_any_pair():
    embeddings, _ = batch(20, 4)
    leaf = embeddings.requires_grad_()
    loss = rg.SmoothAPLoss(backend="triton")
    value = loss(leaf, torch.arange(20, device=DEVICE))
    value.backward()
    assert value == 0
    assert loss.used_queries == 0
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_simix_on_the_kernels():
    embeddings, labels = batch(40, 12)
    values = []
    for backend in ("tiled", "triton"):
        generator = torch.Generator().manual_seed(5)
        loss = rg.SiMix(rg.SmoothAPLoss(0.05, backend=backend, precision="high"), generator)
        leaf = embeddings.clone().requires_grad_()
        value = loss(leaf, labels)
        value.backward()
        values.append((value.detach(), leaf.grad))
    for plain, fused in zip(*values, strict=True):
        assert error(fused, plain) < 1e-5


def test_a_request_that_cannot_be_met_is_refused_with_its_reason(monkeypatch):
    embeddings, labels = batch(12, 3)
    with pytest.raises(RuntimeError, match=r"triton.*float64"):
        rg.SmoothAPLoss(backend="triton")(embeddings.double(), labels)
    with pytest.raises(RuntimeError, match="no kernel for"):
        rg.RankLoss(rg.Blackbox(1.0, 0.1, margin_noise=True), rg.LogRecall(), backend="triton")(embeddings, labels)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        rg.SmoothAPLoss(backend="triton")(embeddings.cpu(), labels.cpu())
    assert torch.isfinite(rg.SmoothAPLoss(backend="auto")(embeddings.cpu(), labels.cpu()))


def test_precision_follows_the_embeddings_and_autocast():
    from rankgrad.ops.backends import resolve_precision

    embeddings = torch.zeros(2, 2, device=DEVICE)
    assert resolve_precision("auto", embeddings) == "high"
    assert resolve_precision("auto", embeddings.half()) == "fast"
    assert resolve_precision("high", embeddings.half()) == "high"
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert resolve_precision("auto", embeddings) == "fast"


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_captured_calls_equal_plain_ones_also_when_two_are_pending():
    small, large = batch(300, 100), batch(300, 10, seed=9)
    for make in (rg.RecallAtKLoss, rg.RamboRecallLoss, rg.FastAPLoss):
        captured, plain = make(backend="triton"), make(backend="triton", cuda_graphs=False)
        run(captured, *small)  # the first call of a shape runs as usual
        leaves = [e.clone().requires_grad_() for e, _ in (small, large)]
        values = [captured(leaf, labels) for leaf, (_, labels) in zip(leaves, (small, large), strict=True)]
        for leaf, value, example in reversed(list(zip(leaves, values, (small, large), strict=True))):
            (value * 4).backward()
            expected = run(plain, *example)
            assert error(value.detach().double(), expected[0]) < 1e-6
            assert error(leaf.grad.double(), expected[1]) < 1e-4
        assert not captured._graphs.refused


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("items", [9_000, 30_000])  # in class order by sorts, and beyond what every GPU captures
def test_large_captured_calls_equal_plain_ones(items, precision, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 2.0**40)
    captured, plain = (rg.RecallAtKLoss(backend="triton", precision=precision, cuda_graphs=graphs) for graphs in (True, False))
    for seed in range(3):  # as usual, captured, replayed
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randperm(items, generator=generator) // 4  # of classes that do not outgrow the capture
        example = torch.randn(items, 64, generator=generator).to(DEVICE), labels.to(DEVICE)
        for found, wanted in zip(run(captured, *example), run(plain, *example), strict=True):
            assert error(found, wanted) < 1e-6
    assert sum(map(len, captured._graphs.free.values())) == 1


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_an_objective_that_waits_runs_as_usual_and_random_numbers_are_drawn_after_it():
    def waiting(ranks):
        return ranks.mean(torch.log1p(ranks.rank)) / float(ranks.rank.detach().max())

    example = batch(300, 100)
    captured, plain = (rg.RankLoss(rg.Sigmoid(0.1), waiting, backend="triton", cuda_graphs=graphs) for graphs in (True, False))
    expected = run(plain, *example)
    for _ in range(3):
        for found, wanted in zip(run(captured, *example), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert 0 < torch.nn.functional.dropout(torch.ones(1000, device="cuda")).count_nonzero() < 1000
    assert captured._graphs.refused
