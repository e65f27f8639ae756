"""A temperature that is learned, scheduled or assigned gives the loss of a ranker that has it."""

import math

import pytest
import torch

import rankgrad as rg
from rankgrad.train.train_step import TrainStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run in the interpreter only where there is no GPU
GENERATOR = torch.Generator().manual_seed(0)
POINTS, LABELS = torch.randn(12, 6, generator=GENERATOR, dtype=torch.float64), torch.arange(12) % 4
GALLERY, GALLERY_LABELS = torch.randn(9, 6, generator=GENERATOR, dtype=torch.float64), torch.arange(9) % 4


def value_and_gradient(loss, points=POINTS, **options):
    x = points.clone().requires_grad_()
    value = loss(x, LABELS, **options)
    return value, torch.autograd.grad(value, x, retain_graph=True)[0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("wrap", [lambda loss: loss, rg.SiMix], ids=["batch", "simix"])
def test_an_assigned_tau_is_that_of_the_ranker(normalize, wrap):
    loss = rg.SmoothAPLoss(0.01, normalize=normalize)
    loss.tau = 0.3
    assert loss.tau == 0.3
    found = []
    for each in (loss, rg.SmoothAPLoss(0.3, normalize=normalize)):
        torch.manual_seed(0)
        found.append(value_and_gradient(wrap(each)))
    torch.testing.assert_close(found[0], found[1])


def test_queries_against_a_gallery_and_given_scores():
    loss, wanted = rg.ApproxNDCGLoss(0.02), rg.ApproxNDCGLoss(0.2)
    loss.tau = 0.2
    gallery = {"ref_emb": GALLERY, "ref_labels": GALLERY_LABELS}
    torch.testing.assert_close(value_and_gradient(loss, **gallery), value_and_gradient(wanted, **gallery))
    scores, relevance = POINTS @ GALLERY.t(), LABELS[:, None] == GALLERY_LABELS
    torch.testing.assert_close(loss.from_scores(scores, relevance), wanted.from_scores(scores, relevance))


def test_delta_and_rho_of_the_bound_go_along():
    loss = rg.SupAPLoss(0.01, rho=100.0, delta=0.05)
    loss.tau = 0.04
    torch.testing.assert_close(value_and_gradient(loss), value_and_gradient(rg.SupAPLoss(0.04, rho=25.0, delta=0.2)))


@pytest.mark.parametrize("precision", ["fast", "high"])
def test_on_the_kernels(precision):
    pytest.importorskip("triton")
    loss = rg.SmoothAPLoss(0.01, backend="triton", precision=precision)
    loss.tau = 0.3
    found = value_and_gradient(loss, POINTS.float().to(DEVICE))
    wanted = value_and_gradient(rg.SmoothAPLoss(0.3, backend="tiled"), POINTS.float().to(DEVICE))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 if precision == "high" else 1e-3)


def test_a_learned_tau_has_the_derivative_of_the_loss():
    loss = rg.SmoothAPLoss(0.2, learn_tau=True).double()
    assert [name for name, _ in loss.named_parameters()] == ["temperature.log_tau"]
    value, gradient = value_and_gradient(loss)
    wanted, wanted_gradient = value_and_gradient(rg.SmoothAPLoss(float(loss.tau)))
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)
    (by_log,) = torch.autograd.grad(value, loss.temperature.log_tau)
    near = [float(rg.SmoothAPLoss(0.2 * math.exp(step))(POINTS, LABELS)) for step in (1e-5, -1e-5)]
    assert float(by_log) == pytest.approx((near[0] - near[1]) / 2e-5, rel=1e-5)
    assert abs(float(by_log)) > 1e-3
    assert set(loss.state_dict()) == {"temperature.log_tau"}
    assert not rg.SmoothAPLoss().state_dict()


def test_training_follows_the_schedule_and_moves_a_learned_tau():
    taus = {}
    for name, loss in {
        "end": rg.SiMix(rg.SmoothAPLoss(0.1, tau_end=0.001)),
        "learned": rg.EmbeddingMemory(rg.SmoothAPLoss(0.1, learn_tau=True), 1),
    }.items():
        settings = rg.TrainSettings(steps=3, lr=0.1)
        step = TrainStep(
            torch.nn.Linear(6, 4), loss, settings, None, steps_per_epoch=3, device=torch.device("cpu")
        )  # fmt: skip
        taus[name] = []
        for number in range(3):
            step(number, 0, torch.arange(12), POINTS.float(), LABELS, warn=print)
            taus[name].append(float(loss.loss.tau))
    assert taus["end"] == pytest.approx([0.1, 0.01, 0.001])
    assert taus["learned"][0] != pytest.approx(0.1)
    assert len(set(taus["learned"])) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rg.FastAPLoss(learn_tau=True), r"FastAPLoss: only a ranker with a tau, Sigmoid or UpperBound.*Histogram"),
        (lambda: rg.RamboAPLoss(tau_end=0.1), "only a ranker with a tau"),
        (lambda: rg.SmoothAPLoss(tau_end=0.1, learn_tau=True), "learn_tau and tau_end exclude each other"),
        (lambda: rg.SmoothAPLoss(tau_end=0.0), "tau_end"),
        (lambda: setattr(rg.SmoothAPLoss(), "tau", -1.0), "tau.*-1"),
        (lambda: setattr(rg.FastAPLoss(), "tau", 1.0), "only a ranker with a tau"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
