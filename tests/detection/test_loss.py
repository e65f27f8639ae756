"""The AP loss of a detector against Algorithm 1 written once more, slowly and in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from rankgrad.detection import DetectionAPLoss

# a larger lam than the paper's, so that in these short lists many items move
LAM, MARGIN = 5.0, 0.15


def batch(seed, regions=40, classes=4, share=0.4, missing=()):
    """Logits and targets; `missing` classes have no region."""
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(regions, classes + 1, generator=draws, dtype=torch.float64)
    targets = torch.randint(1, classes + 1, (regions,), generator=draws)
    targets[torch.rand(regions, generator=draws) > share] = 0
    for label in missing:
        targets[targets == label] = 0
    return logits, targets


def ranking(values):
    """1 for the highest; there are no ties in these tests."""
    return [1 + sum(other > value for other in values) for value in values]


def average_precision(values, relevant, share, lam):
    """1 - AP and its gradient by the scores: margin, ranks, dL/drank, Algorithm 1 with lambda times the list's length."""
    shifted = [value + (-MARGIN / 2 if hit else MARGIN / 2) for value, hit in zip(values, relevant, strict=True)]
    ranks = ranking(shifted)
    among = {
        i: 1 + sum(relevant[j] and ranks[j] < ranks[i] for j in range(len(ranks))) for i, hit in enumerate(relevant) if hit
    }
    total = len(among)
    loss = 1 - sum(among[i] / ranks[i] for i in among) / total
    raw = lam * len(values)
    # d(1 - mean of among / rank) / d rank, times the share of this list in the whole loss
    slope = [share * among[i] / ranks[i] ** 2 / total if i in among else 0.0 for i in range(len(values))]
    moved = ranking([value + raw * g for value, g in zip(shifted, slope, strict=True)])
    return loss, [(after - before) / raw for after, before in zip(moved, ranks, strict=True)]


def slow_loss(logits, targets, past, *, interclass, to_scores, first=1):
    """Value and gradient by the logits of the paper's eq. 22-23; `past` are (scores, hits) of earlier batches."""
    leaf = logits.clone().requires_grad_()
    scores = to_scores(leaf)[:, first:]
    hits = targets[:, None] == torch.arange(first, logits.shape[1])
    gradient, value = torch.zeros_like(scores), 0.0
    lists = [torch.cat([scores.detach(), *(s for s, _ in past)])[:, c].tolist() for c in range(scores.shape[1])]
    relevant = [torch.cat([hits, *(h for _, h in past)])[:, c].tolist() for c in range(scores.shape[1])]
    present = [c for c in range(scores.shape[1]) if any(relevant[c])]
    for c in present if interclass < 1 else ():
        share = (1 - interclass) / len(present)
        loss, slopes = average_precision(lists[c], relevant[c], share, LAM)
        value += share * loss
        gradient[:, c] += torch.tensor(slopes[: len(logits)], dtype=torch.float64)
    if interclass > 0:
        loss, slopes = average_precision(scores.detach().reshape(-1).tolist(), hits.reshape(-1).tolist(), interclass, LAM)
        value += interclass * loss
        gradient += torch.tensor(slopes, dtype=torch.float64).reshape(scores.shape)
    scores.backward(gradient)
    return value, leaf.grad, (scores.detach(), hits)


@pytest.mark.parametrize(
    ("scores", "to_scores"), [("softmax", lambda x: x.softmax(1)), ("sigmoid", torch.sigmoid), ("logits", lambda x: x.clone())]
)
@pytest.mark.parametrize("interclass", [1 / 3, 0.0, 1.0])
def test_value_and_gradient_are_those_of_the_paper_also_with_a_memory(scores, to_scores, interclass):
    loss = DetectionAPLoss(lam=LAM, margin_cap=False, scores=scores, interclass=interclass, memory=2)
    past, moved = [], 0
    for call, missing in enumerate([(2,), (), (3,), (1, 2)]):
        logits, targets = batch(call, regions=50 + call, missing=missing)
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, targets)
        value.backward()
        wanted, gradient, seen = slow_loss(logits, targets, past, interclass=interclass, to_scores=to_scores)
        assert float(value.detach()) == pytest.approx(wanted, abs=1e-12)
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-12)
        moved += int((gradient != 0).sum())
        past = [*past, seen][-2:]
    assert moved > 30


def test_background_as_a_class_is_one_more_list():
    logits, targets = batch(5)
    leaf = logits.clone().requires_grad_()
    value = DetectionAPLoss(lam=LAM, margin_cap=False, background="class", memory=0)(leaf, targets)
    value.backward()
    wanted, gradient, _ = slow_loss(logits, targets, [], interclass=1 / 3, to_scores=lambda x: x.softmax(1), first=0)
    assert float(value.detach()) == pytest.approx(wanted, abs=1e-12)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-12)
    assert wanted != pytest.approx(float(DetectionAPLoss(memory=0)(logits, targets)))


def test_a_head_without_a_column_for_background_and_a_matrix_of_targets_are_the_same():
    logits, targets = batch(6)
    with_background = DetectionAPLoss(scores="sigmoid", memory=0)(logits, targets)
    without = DetectionAPLoss(scores="sigmoid", memory=0, background="none")
    matrix = F.one_hot(targets, 5)[:, 1:]
    assert float(without(logits[:, 1:], targets)) == pytest.approx(float(with_background), abs=1e-12)
    for kind in (torch.bool, torch.int64, torch.float32):
        assert float(without(logits[:, 1:], matrix.to(kind))) == pytest.approx(float(with_background), abs=1e-12)


def test_a_region_may_be_of_several_classes():
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0], [-1.0, -2.0]])
    both = torch.tensor([[1, 1], [0, 1], [0, 0]])
    loss = DetectionAPLoss(scores="logits", margin=0.0, interclass=0.0, memory=0)
    assert float(loss(scores, both)) == 0
    assert float(loss(scores, both.flip(0))) > 0.3


def test_the_memory_lengthens_the_lists_of_classes_and_is_part_of_the_state():
    first, second = batch(0), batch(1)
    loss = DetectionAPLoss(memory=7)
    loss(*first)
    saved = loss.state_dict()
    after = float(loss(*second))
    assert after != pytest.approx(float(DetectionAPLoss()(*second)), abs=1e-6)
    other = DetectionAPLoss(memory=7)
    other.load_state_dict(saved)
    assert float(other(*second)) == after
    loss.reset()
    assert float(loss(*second)) == float(DetectionAPLoss()(*second))


def test_the_memory_holds_the_last_calls_in_training_mode_only():
    loss = DetectionAPLoss(margin=0.0, memory=2)
    for seed in range(4):
        loss(*batch(seed))
    assert len(loss.classes.past) == 2
    assert torch.equal(loss.classes.past[-1][0], batch(3)[0].softmax(1)[:, 1:].t())
    held = loss.classes.past
    loss.eval()(*batch(9))
    assert loss.classes.past is held


def test_a_class_that_only_the_memory_has_counts_in_the_mean():
    """The published code averages over classes with a positive in batch and memory together."""
    loss = DetectionAPLoss(interclass=0.0, memory=1)
    loss(*batch(0))
    logits, targets = batch(1, missing=(1,))
    loss(logits, targets)
    assert int(loss.classes.used_queries) == 4


def test_what_follows_the_loss_scales_its_gradient():
    logits, targets = batch(3)
    gradients = []
    for weight, factor in ((1.0, 1.0), (2.0, 1.0), (1.0, 1024.0)):
        leaf = logits.clone().requires_grad_()
        (factor * DetectionAPLoss(weight=weight)(leaf, targets)).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0])
    torch.testing.assert_close(gradients[2], 1024 * gradients[0])


def losses_and_gradients(loss, calls, device="cpu"):
    found = []
    for logits, targets in calls:
        leaf = logits.to(device).requires_grad_()
        value = loss(leaf, targets.to(device))
        found.append((value.detach(), torch.autograd.grad(3 * value, leaf)[0]))
    return found


# numpy, on which the interpreter runs, remarks on what is infinity on a GPU
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"scores": "sigmoid", "background": "class"}, {"background": "none", "weight": 2.0}])
def test_a_program_that_does_not_synchronise_gives_the_same(options, monkeypatch):
    pytest.importorskip("triton")
    calls = [(logits.float(), targets) for logits, targets in (batch(seed, regions=60 + seed, classes=3) for seed in range(4))]
    plain, stepping = (DetectionAPLoss(lam=LAM, memory=2, **options) for _ in range(2))
    monkeypatch.setattr("rankgrad.ops.functional._may_capture", lambda leaf, config: config.compute.backend == "triton")
    monkeypatch.setattr(stepping._graphs, "run", lambda *given: None)
    stepping.classes.loss.backend = stepping.across.backend = "triton"
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run in the interpreter only where there is no GPU
    wanted = losses_and_gradients(plain, calls, device)
    torch.testing.assert_close(losses_and_gradients(stepping, calls, device), wanted, rtol=1e-5, atol=1e-7)
    assert all(gradient.any() for _, gradient in wanted)
    torch.testing.assert_close(stepping.state_dict(), plain.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_graphs_give_the_same():
    # more and more positives on the way, and a number of regions that is not always the same
    sizes = [(4096, 0.1), (4096, 0.1), (4096, 0.2), (4096, 0.25), (4000, 0.25), (4096, 0.25), (4096, 0.02), (4096, 0.3)]
    drawn = [batch(seed, regions, 20, share) for seed, (regions, share) in enumerate([*sizes, *sizes])]
    calls = [(logits.float(), targets) for logits, targets in drawn]
    plain, replayed = (DetectionAPLoss(memory=3, cuda_graphs=graphs) for graphs in (False, True))
    wanted = losses_and_gradients(plain, calls, "cuda")
    torch.testing.assert_close(losses_and_gradients(replayed, calls, "cuda"), wanted, rtol=1e-5, atol=1e-9)
    assert any(free for free in replayed._graphs.free.values())
    assert not replayed._graphs.refused
    torch.testing.assert_close(replayed.state_dict(), plain.state_dict())


def test_nothing_to_find_is_a_zero_with_a_graph():
    logits, targets = batch(0)
    leaf = logits.clone().requires_grad_()
    value = DetectionAPLoss()(leaf, torch.zeros_like(targets))
    value.backward()
    assert float(value.detach()) == 0
    assert not leaf.grad.any()
    empty = torch.zeros(0, 5, requires_grad=True)
    DetectionAPLoss()(empty, torch.zeros(0, dtype=torch.long)).backward()
    assert empty.grad.shape == (0, 5)


def test_sixteen_bits_are_ranked_in_float32():
    logits, targets = batch(0)
    half = logits.to(torch.bfloat16)
    value = DetectionAPLoss()(half, targets)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(DetectionAPLoss()(half.float(), targets)), abs=1e-7)


def test_training_on_the_loss_ranks_regions():
    logits, targets = batch(0, regions=400)
    leaf = logits.clone().float().requires_grad_()
    loss, optimizer = DetectionAPLoss(memory=0), torch.optim.Adam([leaf], lr=0.1)
    first = float(loss(leaf, targets).detach())
    for _ in range(60):
        optimizer.zero_grad()
        loss(leaf, targets).backward()
        optimizer.step()
    assert float(loss(leaf, targets).detach()) < 0.5 * first


def small_head(seed=0):
    """Features that tell classes apart, and a head whose scores are all but equal."""
    draws = torch.Generator().manual_seed(seed)
    targets = batch(seed, regions=200)[1]
    features = F.one_hot(targets, 5).float() + 0.3 * torch.randn(200, 5, generator=draws)
    head = torch.nn.Linear(5, 5)
    with torch.no_grad():
        head.weight.copy_(0.02 * torch.randn(5, 5, generator=draws))
        head.bias.zero_()
    return features, targets, head


@pytest.mark.parametrize(("cap", "starts"), [(False, False), (True, True)])
def test_a_capped_margin_lets_a_fresh_head_start(cap, starts):
    features, targets, head = small_head()
    loss, optimizer = DetectionAPLoss(margin_cap=cap, memory=2), torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss(head(features), targets).backward()
        optimizer.step()
    value = float(DetectionAPLoss(margin=0.0, memory=0)(head(features), targets).detach())
    assert (value < 0.1) == starts, value


def test_the_cap_is_half_the_distance_between_positives_and_negatives_of_a_class():
    scores = torch.tensor([[0.9, 0.3], [0.5, 0.4], [0.2, 0.7]], dtype=torch.float64)
    targets = torch.tensor([[1, 0], [1, 0], [0, 1]])
    # first class: 0.7 against 0.2; second: 0.7 against 0.35
    half = torch.tensor([0.25, 0.175], dtype=torch.float64)
    for margin in (2.0, 0.2, 0.1, 0.0):
        loss = DetectionAPLoss(scores="logits", margin=margin, memory=1)
        loss(scores, targets)
        shifted = scores + half.clamp(max=margin) * (0.5 - targets.double())
        torch.testing.assert_close(loss.classes.past[0][0], shifted.t())
    backwards = DetectionAPLoss(scores="logits", margin=2.0, memory=1)
    backwards(-scores, targets)
    assert torch.equal(backwards.classes.past[0][0], -scores.t())


def test_a_class_that_is_behind_the_others_still_has_a_gradient():
    draws = torch.Generator().manual_seed(0)
    targets = torch.tensor([1] * 30 + [2] * 10 + [0] * 160)
    logits = 0.1 * torch.randn(200, 3, generator=draws)
    logits[:30, 1] += 6  # the first class is found already, the second is all but forgotten
    logits[:, 2] -= 3
    logits[30:40, 2] += 0.1
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(DetectionAPLoss(memory=0)(logits, targets), logits)
    assert (gradient[30:40, 2] < 0).all()


def test_the_noisy_margin_of_the_published_code_is_drawn_from_torch():
    logits, targets = batch(0)
    loss = DetectionAPLoss(margin_noise=True, margin=1.0, margin_cap=False, memory=0)
    values = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            values.append(float(loss(logits, targets)))
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lam": 0}, ValueError, "lam must be a finite number above 0"),
        ({"margin": -0.1}, ValueError, "margin must be a finite number of at least 0"),
        ({"interclass": 1.5}, ValueError, "interclass must be within 0 and 1, got 1.5"),
        ({"memory": 1.5}, TypeError, "memory must be an integer"),
        ({"scores": "probabilities"}, ValueError, "scores must be one of 'softmax', 'sigmoid', 'logits', got 'probabilities'"),
        ({"background": "ignore"}, ValueError, "background must be one of 'negative', 'class', 'none'"),
        ({"weight": math.inf}, ValueError, "weight must be finite"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        DetectionAPLoss(**options)


@pytest.mark.parametrize(
    ("logits", "targets", "error", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), ValueError, r"logits must be \[regions, 1 \+ classes\], got shape"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), ValueError, r"logits must be \[regions, 1 \+ classes\]"),
        (torch.zeros(3, 4), torch.zeros(4, dtype=torch.long), ValueError, r"targets must be \(3,\) integers or a matrix"),
        (torch.zeros(3, 4), torch.zeros(3), TypeError, "targets must be integers, the class of each region"),
        (torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, dtype=torch.long), TypeError, "logits must be a floating-point"),
        ([[0.0]], torch.zeros(1, dtype=torch.long), TypeError, "logits must be a torch.Tensor, got list"),
        (torch.zeros(3, 4), torch.tensor([0, 4, 1]), ValueError, "targets must be 0 for background or a class up to 3, got 4"),
        (torch.zeros(3, 4), torch.tensor([0, -1, 1]), ValueError, "got -1; leave ignored regions out"),
        (torch.full((3, 4), math.nan), torch.tensor([0, 1, 1]), ValueError, "logits must be finite, got 12 NaN"),
    ],
)
def test_wrong_input_is_refused(logits, targets, error, message):
    with pytest.raises(error, match=message):
        DetectionAPLoss(validate=True)(logits, targets)


def test_another_number_of_classes_than_in_memory_is_refused():
    loss = DetectionAPLoss()
    loss(*batch(0))
    with pytest.raises(ValueError, match="scores must have the 4 rows of those in memory"):
        loss(*batch(0, classes=6))
