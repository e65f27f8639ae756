"""NaN, large numbers and second derivatives: no loss answers with a number that means nothing."""

import pytest
import torch
from torch import Tensor

import rankgrad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run in the interpreter only where there is no GPU
LOSSES = {
    "recall_at_k": rankgrad.RecallAtKLoss,
    "smooth_ap": rankgrad.SmoothAPLoss,
    "fastap": rankgrad.FastAPLoss,
    "rambo_recall": rankgrad.RamboRecallLoss,
}
each_loss = pytest.mark.parametrize("name", LOSSES)
each_backend = pytest.mark.parametrize(
    "backend", ["tiled", "reference", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning"))]
)


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(20, 8, generator=rng), torch.arange(5).repeat_interleave(4)[torch.randperm(20, generator=rng)]


def kernels_are_there(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")


@each_loss
@each_backend
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_in_gives_nan_out_and_a_nan_gradient(name, backend, reduction):
    kernels_are_there(backend)
    x, labels = batch()
    x[3, 2] = torch.nan
    x = x.to(DEVICE).requires_grad_()
    value = LOSSES[name](backend=backend, reduction=reduction)(x, labels)
    assert value.isnan().all()
    assert torch.autograd.grad(value.sum(), x)[0].isnan().any()


@each_loss
@pytest.mark.parametrize("tile", [512, 4])
def test_a_nan_among_references_or_scores_is_seen_too(name, tile, monkeypatch):
    monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: tile)
    x, labels = batch()
    bad = x.clone()
    bad[7] = torch.nan
    assert LOSSES[name]()(x, labels, bad, labels).isnan()
    scores, relevance = x @ x.t(), labels[:, None] == labels
    irrelevant = int((~relevance[0]).nonzero()[0])
    scores[0, irrelevant] = torch.nan
    assert LOSSES[name]().from_scores(scores, relevance).isnan()
    ranked = torch.ones_like(relevance)
    ranked[0, irrelevant] = False  # what is not ranked may be anything
    assert LOSSES[name]().from_scores(scores, relevance, candidates=ranked).isfinite()
    scores[0, irrelevant] = -torch.inf  # a score may be infinite
    assert LOSSES[name]().from_scores(scores, relevance).isfinite()


@each_loss
@each_backend
@pytest.mark.parametrize("factor", [1e30, 1e38])
def test_large_finite_embeddings_are_normalised(name, backend, factor):
    kernels_are_there(backend)
    x, labels = batch()
    x = x / x.abs().max()
    results = []
    for scale in (1.0, factor):
        leaf = (x * scale).to(DEVICE).requires_grad_()
        value = LOSSES[name](backend=backend, precision="high")(leaf, labels)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0] * scale))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_normalised_rows_are_those_of_torch():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1], x[2] = 0, x[2] * 1e-9
    from rankgrad.ops.normalize import normalize_rows

    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, wanted = normalize_rows(leaf), torch.nn.functional.normalize(other)
    torch.testing.assert_close(ours, wanted)
    upstream = torch.rand(6, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(ours, leaf, upstream), torch.autograd.grad(wanted, other, upstream))


@each_loss
@each_backend
@pytest.mark.parametrize("normalize", [True, False])
def test_a_second_derivative_is_refused_and_create_graph_alone_is_not(name, backend, normalize):
    kernels_are_there(backend)
    if backend == "reference" and not normalize:
        pytest.skip("plain autograd, which is right or refuses by itself")
    x, labels = batch()
    x = (x / 4).to(DEVICE).requires_grad_()
    loss = LOSSES[name](backend=backend, normalize=normalize)
    (plain,) = torch.autograd.grad(loss(x, labels), x)
    (gradient,) = torch.autograd.grad(loss(x, labels), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), plain)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (loss(x, labels) + gradient.square().sum()).backward()
