"""Products on a CPU: by whichever library they are made, they are the same numbers, and equal rows have equal scores."""

import platform

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import rankgrad as rg
from rankgrad.ops import cpu_products
from rankgrad.ops.cpu_products import add_product_, dot_products, product

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="torch was built without oneDNN",
)


def sums_alike():
    return torch.backends.mkldnn.is_available() and cpu_products._sums_alike()


@pytest.fixture
def by_onednn(monkeypatch):
    monkeypatch.setattr(cpu_products, "_is_faster", lambda: True)


def rows(count: int, dim: int) -> Tensor:
    return normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(count + dim)))


@needs_onednn
@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("dim", [1, 3, 64, 128, 130, 512, 770])
def test_scores_are_as_near_to_float64_as_those_of_torch(dim):
    queries, candidates = rows(300, dim), rows(260, dim)
    exact = queries.double() @ candidates.double().t()
    found, plain = dot_products(queries, candidates) - exact, queries @ candidates.t() - exact
    assert found.square().mean() <= 1.5 * plain.square().mean()


@pytest.mark.skipif(not sums_alike(), reason="this oneDNN is not used: its sums depend on the place of a score")
@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("dim", [64, 130, 512])
def test_a_score_is_the_same_in_every_product_of_its_rows(dim):
    queries, candidates = rows(300, dim), rows(260, dim)
    scores = dot_products(queries, candidates)
    assert torch.equal(dot_products(candidates, queries).t(), scores)
    for height, width in [(1, 1), (1, 260), (300, 1), (2, 3), (17, 64), (64, 260), (300, 5)]:
        part = dot_products(queries[-height:], candidates[7 : 7 + width])
        assert torch.equal(part, scores[-height:, 7 : 7 + width])
    out = torch.empty_like(scores)
    assert torch.equal(dot_products(queries, candidates, out=out), scores)


@needs_onednn
@pytest.mark.usefixtures("by_onednn")
def test_products_of_any_strides_are_those_of_float64():
    left, right = rows(400, 512)[:, 100:400], rows(512, 640)[::2, ::2].t()[:300]
    exact = left.double() @ right.double()
    assert torch.allclose(product(left, right).double(), exact, atol=1e-6)
    total = torch.ones(400, 256)
    assert torch.allclose(add_product_(total, left, right).double(), 1 + exact, atol=1e-6)
    transposed = product(rows(300, 400).t(), rows(300, 500))
    assert torch.allclose(transposed.double(), rows(300, 400).double().t() @ rows(300, 500).double(), atol=1e-6)


@needs_onednn
@pytest.mark.usefixtures("by_onednn")
def test_losses_of_many_tiles_and_of_one_equal_the_definition():
    for count in (260, 1100):
        embeddings, labels = rows(count, 192), torch.arange(count) // 4
        ours, exact = embeddings.clone().requires_grad_(), embeddings.double().requires_grad_()
        loss, definition = rg.RecallAtKLoss()(ours, labels), rg.RecallAtKLoss()(exact, labels)
        loss.backward()
        definition.backward()
        assert abs(loss.item() - definition.item()) < 1e-6
        assert (ours.grad - exact.grad).norm() < 1e-4 * exact.grad.norm()


def test_other_dtypes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cpu_products, "_is_faster", lambda: True)
    x = rows(300, 512).double()
    assert torch.equal(dot_products(x, x), x @ x.t())
    assert torch.equal(product(x, x.t()), x @ x.t())


@pytest.mark.parametrize(("vendor", "expected"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_the_choice_follows_the_processor(vendor, expected, monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(cpu_products, "CPU_INFO", path)
    for module, name in [(torch.backends.mkl, "is_available"), (torch.backends.mkldnn, "is_available")]:
        monkeypatch.setattr(module, name, lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
    for alike in (True, False):
        monkeypatch.setattr(cpu_products, "_sums_alike", lambda alike=alike: alike)
        assert cpu_products._is_faster.__wrapped__() is (expected and alike)
    monkeypatch.setattr(cpu_products, "_sums_alike", lambda: True)
    # without 512-bit instructions MKL is level
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not cpu_products._is_faster.__wrapped__()


@needs_onednn
def test_defaults_of_the_caller_make_no_difference():
    alike = cpu_products._sums_alike()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert cpu_products._sums_alike() is alike
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_system_without_cpuinfo_asks_python(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_products, "CPU_INFO", tmp_path / "missing")
    for name, expected in [("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", True), ("arm", False)]:
        monkeypatch.setattr(platform, "processor", lambda name=name: name)
        assert cpu_products._is_amd() is expected
