"""How a loss behaves as a citizen of PyTorch: dtypes, autocast, layouts, determinism, graphs, memory."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankgrad
from rankgrad.ops import autograd

LOSSES = {
    "recall_at_k": lambda: rankgrad.RecallAtKLoss(tau_rank=0.1),
    "smooth_ap": lambda: rankgrad.SmoothAPLoss(tau=0.1),
    "fastap": rankgrad.FastAPLoss,
    "rambo_recall": rankgrad.RamboRecallLoss,
    "rambo_ap": lambda: rankgrad.RamboAPLoss(lam=4.0),
    "histogram_ndcg": lambda: rankgrad.RankLoss(rankgrad.Histogram(8), rankgrad.NDCG()),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def batch(n: int = 24, dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Classes of one to a few, in no order."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, n // 4, (n,), generator=rng)
    labels[3] = 10**12  # stands alone
    return torch.randn(n, dim, generator=rng).to(dtype), labels


def value_and_gradient(loss, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x, labels)
    return value.detach(), torch.autograd.grad(value, x)[0]


def same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for first, second in zip(a, b, strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)


@each_loss
def test_autocast_changes_nothing(name):
    loss, (x, labels) = LOSSES[name](), batch()
    plain = value_and_gradient(loss, x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        cast = value_and_gradient(loss, x, labels)
    assert cast[0].dtype == torch.float32
    same_bits(cast, plain)


@each_loss
def test_autocast_changes_nothing_of_given_scores(name):
    loss, (x, _) = LOSSES[name](), batch()
    plain = loss.from_scores(x, x > 0.8)
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss.from_scores(x, x > 0.8)
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)


@each_loss
def test_loss_after_an_autocast_model(name):
    """bfloat16 embeddings arrive, float32 leaves, and the weights get a finite gradient."""
    model = nn.Linear(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        x, labels = batch()
        embeddings = model(x)
        assert embeddings.dtype == torch.bfloat16
        value = LOSSES[name]()(embeddings, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert model.weight.grad.isfinite().all()
    assert model.weight.grad.any()


@each_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    loss, (x, labels) = LOSSES[name](), batch(dtype=dtype)
    value, gradient = value_and_gradient(loss, x, labels)
    wanted, wanted_gradient = value_and_gradient(loss, x.float(), labels)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_keeps_its_dtype(name, dtype):
    value, gradient = value_and_gradient(LOSSES[name](), *batch(dtype=dtype))
    assert (value.dtype, gradient.dtype) == (dtype, dtype)


@each_loss
def test_float32_is_near_float64(name):
    x, labels = batch()
    single, double = (value_and_gradient(LOSSES[name](), x.to(t), labels) for t in (torch.float32, torch.float64))
    torch.testing.assert_close(single[0].double(), double[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single[1].double(), double[1], rtol=1e-3, atol=1e-4)


@each_loss
def test_non_contiguous_input(name):
    loss, (x, labels) = LOSSES[name](), batch()
    wide = torch.stack([x, torch.full_like(x, 7.0)], dim=2)
    spread = torch.stack([labels, labels + 1], dim=1)
    for strided in (x.T.contiguous().T, wide[:, :, 0]):
        assert not strided.is_contiguous()
        leaf = strided.detach().requires_grad_()
        value = loss(leaf, spread[:, 0])
        wanted, wanted_gradient = value_and_gradient(loss, x, labels)
        torch.testing.assert_close(value.detach(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], wanted_gradient, rtol=1e-4, atol=1e-5)
    scores = loss.from_scores(x.T, x.T > 0.8)
    torch.testing.assert_close(scores, loss.from_scores(x.T.contiguous(), (x.T > 0.8).contiguous()))


@each_loss
def test_same_input_same_bits(name):
    x, labels = batch(n=150, dim=16)
    same_bits(value_and_gradient(LOSSES[name](), x, labels), value_and_gradient(LOSSES[name](), x, labels))


@each_loss
def test_order_of_the_batch_does_not_matter(name):
    x, labels = batch(dtype=torch.float64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    value, gradient = value_and_gradient(LOSSES[name](), x, labels)
    shuffled, shuffled_gradient = value_and_gradient(LOSSES[name](), x[order], labels[order])
    torch.testing.assert_close(shuffled, value)
    torch.testing.assert_close(shuffled_gradient, gradient[order])


@each_loss
def test_input_and_global_state_are_left_alone(name):
    x, labels = batch()
    before, labels_before, state = x.clone(), labels.clone(), torch.get_rng_state()
    value_and_gradient(LOSSES[name](), x, labels)
    LOSSES[name]().from_scores(x, x > 0.8)
    assert torch.equal(x, before)
    assert torch.equal(labels, labels_before)
    assert torch.equal(torch.get_rng_state(), state)


@each_loss
def test_labels_of_any_integer_type(name):
    x, labels = batch()
    labels[3] = 100
    wanted = LOSSES[name]()(x, labels)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(LOSSES[name]()(x, labels.to(dtype)), wanted)


@each_loss
def test_after_a_compiled_model(name):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    compiled = torch.compile(plain, backend="aot_eager")
    x, labels = batch()
    gradients = []
    for model in (plain, compiled):
        plain.zero_grad()
        LOSSES[name]()(model(x), labels).backward()
        gradients.append([p.grad.clone() for p in plain.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one)


@each_loss
def test_two_forwards_before_the_first_backward(name):
    loss = LOSSES[name]()
    batches = [batch(n=20, seed=1), batch(n=28, seed=2)]
    wanted = [value_and_gradient(LOSSES[name](), *b)[1] for b in batches]
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    values = [loss(x, labels) for x, (_, labels) in zip(leaves, batches, strict=True)]
    for value, x, gradient in zip(values, leaves, wanted, strict=True):
        value.backward()
        assert torch.equal(x.grad, gradient)


@each_loss
def test_second_backward_needs_the_graph_kept(name):
    x, labels = batch()
    x.requires_grad_()
    value = LOSSES[name]()(x, labels)
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    (second,) = torch.autograd.grad(value, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, x)


@each_loss
def test_a_loss_that_is_held_does_not_hold_what_its_backward_pass_needed(name, monkeypatch):
    states, forward_pass = [], autograd.forward_pass

    def watched(*arguments, **options):
        losses, state = forward_pass(*arguments, **options)
        states.append(weakref.ref(state))
        return losses, state

    monkeypatch.setattr(autograd, "forward_pass", watched)
    (x, labels), total = batch(), 0.0
    for _ in range(3):
        value = LOSSES[name]()(x.clone().requires_grad_(), labels)
        total = total + value  # without detach()
        value.backward(retain_graph=True)
        assert states[-1]() is not None
        value.backward()
        gc.collect()
        assert states[-1]() is None
    assert len(states) == 3


@each_loss
def test_a_batch_of_lone_items_is_zero_and_attached(name):
    loss, (x, _) = LOSSES[name](), batch(n=5)
    value, gradient = value_and_gradient(loss, x, torch.arange(5))
    assert value.item() == 0
    assert not gradient.any()
    assert loss.used_queries.item() == 0
    scores = x.clone().requires_grad_()
    value = loss.from_scores(scores, torch.zeros_like(x, dtype=torch.bool))
    assert value.item() == 0
    assert not torch.autograd.grad(value, scores)[0].any()


@each_loss
def test_one_item(name):
    value, gradient = value_and_gradient(LOSSES[name](), torch.ones(1, 3), torch.tensor([4]))
    assert value.item() == 0
    assert not gradient.any()


@each_loss
def test_used_queries(name):
    loss, (x, _) = LOSSES[name](), batch(n=7)
    loss(x, torch.tensor([1, 1, 2, 3, 3, 3, 9]))
    assert loss.used_queries.shape == ()
    assert loss.used_queries.dtype == torch.int64
    assert loss.used_queries.item() == 5
    loss.from_scores(x, torch.arange(7)[:, None].repeat(1, 8) < 2)
    assert loss.used_queries.item() == 2


@each_loss
def test_only_the_queries_want_a_gradient(name):
    loss, (x, labels) = LOSSES[name](), batch(dtype=torch.float64)
    queries = x[:6].clone().requires_grad_()
    both, gallery = x[:6].clone().requires_grad_(), x[6:].clone().requires_grad_()
    one = loss(queries, labels[:6], x[6:], labels[6:])
    two = loss(both, labels[:6], gallery, labels[6:])
    torch.testing.assert_close(*(torch.autograd.grad(v, q)[0] for v, q in ((one, queries), (two, both))))


@each_loss
def test_zero_embedding_stays_finite(name):
    x, labels = batch()
    x[0] = 0
    value, gradient = value_and_gradient(LOSSES[name](), x, labels)
    assert value.isfinite()
    assert gradient.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@each_loss
def test_nothing_of_size_queries_times_candidates(name):
    n = 3000
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=rng, requires_grad=True)
    labels = torch.randperm(n, generator=rng) // 4
    loss = LOSSES[name]()
    with LargestTensor() as seen:
        loss(x, labels).backward()
    assert x.grad.any()
    assert x.numel() <= seen.numel < n * n, f"a tensor of {seen.numel} elements for {n} x {n} scores"


def test_the_largest_tensor_is_seen_in_forward_and_backward():
    x = torch.ones(50, 2, requires_grad=True)
    with LargestTensor() as forward:
        value = (x @ x.T).sum()
    with LargestTensor() as backward:
        value.backward()
    assert (forward.numel, backward.numel) == (2500, 2500)
