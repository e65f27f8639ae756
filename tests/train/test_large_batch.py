"""Multistage back-propagation is the gradient of the whole batch, and says so when it is not."""

import copy
import os
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn

import rankgrad as rg
from rankgrad.train import activation_budget, large_batch
from rankgrad.train.large_batch import LargeBatch

ITEMS = 22  # no multiple of any chunk size below


class Recurrent(nn.Module):
    """Draws at several depths, so that a mask in the wrong order shows."""

    def __init__(self, dropout=0.4):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.dropout(torch.tanh(self.first(x)))
        return self.third(self.dropout(torch.tanh(self.second(x))))


def problem(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = Recurrent().to(dtype)
    return model, torch.randn(ITEMS, 6, dtype=dtype), torch.randint(5, (ITEMS,))


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def plain_gradients(model, loss, images, labels, chunk_size, scale=1.0):
    """The definition: one graph over the whole batch; random layers draw chunk by chunk."""
    model.zero_grad()
    embeddings = torch.cat([model(part) for part in images.split(chunk_size or len(images))])
    value = loss(embeddings, labels)
    (scale * value).backward()
    return value.detach(), gradients(model)


LOSSES = {
    "recall at k": lambda: rg.RecallAtKLoss(tau_rank=0.1),
    "FastAP": rg.FastAPLoss,
    "SiMix": lambda: rg.SiMix(rg.RecallAtKLoss(tau_rank=0.1)),
    "memory": lambda: rg.EmbeddingMemory(rg.SmoothAPLoss(tau=0.1), size=2),
    "a function": lambda: lambda e, y: (e @ e.t()).square().mean() + (e.sum(1) * y).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("chunk_size", "keep"), [(4, 0), (4, 2), (4, "auto"), (1, 0), (7, 100), (0, 0), (100, 0)])
def test_gradients_are_those_of_the_whole_batch(name, chunk_size, keep):
    model, images, labels = problem()
    ours, theirs = LOSSES[name](), LOSSES[name]()
    step = LargeBatch(model, ours, chunk_size, keep)
    for scale in (1.0, 1000.0):  # the memory and the measured "auto" differ from step to step
        torch.manual_seed(5)
        value, wanted = plain_gradients(model, theirs, images, labels, chunk_size, scale)
        state = torch.get_rng_state()
        model.zero_grad()
        torch.manual_seed(5)
        assert torch.equal(step(images, labels, scale=scale), value)
        torch.testing.assert_close(gradients(model), wanted, rtol=1e-10, atol=1e-10 * scale)
        assert torch.equal(torch.get_rng_state(), state), "the generator must stand where a plain step leaves it"


def test_a_different_batch_does_not_agree():
    model, images, labels = problem()
    torch.manual_seed(5)
    _, wanted = plain_gradients(model, rg.FastAPLoss(), images, labels, 4)
    model.zero_grad()
    torch.manual_seed(5)
    LargeBatch(model, rg.FastAPLoss(), 4)(images.flip(0), labels)
    assert nn.functional.cosine_similarity(gradients(model), wanted, dim=0) < 0.99


def test_without_replaying_the_random_state_it_would_be_wrong(monkeypatch):
    monkeypatch.setattr(large_batch.RngSnapshot, "restore", lambda self: None)
    model, images, labels = problem()
    torch.manual_seed(5)
    _, wanted = plain_gradients(model, rg.FastAPLoss(), images, labels, 4)
    model.zero_grad()
    torch.manual_seed(5)
    LargeBatch(model, rg.FastAPLoss(), 4, keep=0)(images, labels)
    assert nn.functional.cosine_similarity(gradients(model), wanted, dim=0) < 0.99


def bf16(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_honoured(inside, keep):
    model, images, labels = problem(dtype=torch.float32)
    loss = rg.SmoothAPLoss(tau=0.1)
    torch.manual_seed(5)
    # with cached casts the chunks of this one graph would add up their gradients in bfloat16
    with bf16(cache_enabled=False):
        embeddings = torch.cat([model(part) for part in images.split(4)])
        value = loss(embeddings, labels)
    assert embeddings.dtype == torch.bfloat16
    value.backward()
    wanted = gradients(model)
    _, in_float32 = plain_gradients(model, loss, images, labels, 4)
    model.zero_grad()
    torch.manual_seed(5)
    if inside:
        assert torch.equal(LargeBatch(model, loss, 4, keep, autocast=torch.bfloat16)(images, labels), value)
    else:
        with bf16():
            assert torch.equal(LargeBatch(model, loss, 4, keep)(images, labels), value)
    assert (gradients(model) - wanted).norm() <= 1e-3 * wanted.norm()
    assert (in_float32 - wanted).norm() > 1e-3 * wanted.norm(), "this must have been bfloat16"


def test_a_float32_island_in_the_loss_stays_one_in_its_backward_pass():
    model, images, labels = problem(dtype=torch.float32)
    weights = torch.randn(5, 5)

    def loss(embeddings, labels):
        with torch.autocast("cpu", enabled=False):
            return (embeddings.float() @ weights).square().mean()

    step = LargeBatch(model, loss, 4)
    with bf16():
        step(images, labels)
    leaf = step.embeddings.float().requires_grad_()
    loss(leaf, labels).backward()
    # the embeddings are bfloat16, and so is what reaches them; the products before that are not
    assert torch.equal(step.embedding_gradient, leaf.grad.bfloat16())


def test_bf16_errs_no_more_than_the_whole_batch_at_once():
    model, images, labels = problem(dtype=torch.float32)
    model.eval()
    loss = rg.SmoothAPLoss(tau=0.1)
    _, exact = plain_gradients(model, loss, images, labels, 0)
    model.zero_grad()
    with bf16():
        value = loss(model(images), labels)
    value.backward()
    plain = gradients(model)
    model.zero_grad()
    LargeBatch(model, loss, 4, autocast=torch.bfloat16)(images, labels)
    assert (gradients(model) - exact).norm() <= 1.5 * (plain - exact).norm()


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_nested_images():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4).double()

        def forward(self, x):
            assert x["name"] == "kept as it is"
            return self.linear(x["pair"].left) + self.linear(x["pair"].right) + x["list"][0]

    torch.manual_seed(0)
    model, labels = Reads(), torch.arange(ITEMS) % 3
    images = {
        "pair": Pair(*torch.randn(2, ITEMS, 6, dtype=torch.float64)),
        "list": [torch.randn(ITEMS, 4, dtype=torch.float64)],
        "name": "kept as it is",
    }
    loss = rg.FastAPLoss()
    loss(model(images), labels).backward()
    wanted = gradients(model)
    model.zero_grad()
    LargeBatch(model, loss, 5, 0)(images, labels)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-10, atol=1e-12)


def test_a_loss_with_parameters_gets_its_gradient():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, embeddings, labels):
            return self.factor * embeddings.square().mean()

    model, images, labels = problem()
    model.eval()
    loss = Scaled()
    LargeBatch(model, loss, 4)(images, labels)
    torch.testing.assert_close(loss.factor.grad, model(images).square().mean().detach())


def test_embeddings_and_their_gradient_can_be_looked_at():
    model, images, labels = problem()
    model.eval()
    loss = rg.FastAPLoss()
    step = LargeBatch(model, loss, 4)
    step(images, labels)
    leaf = model(images).detach().requires_grad_()
    loss(leaf, labels).backward()
    torch.testing.assert_close(step.embeddings, leaf.detach())
    torch.testing.assert_close(step.embedding_gradient, leaf.grad)


def test_kept_chunks_skip_their_second_pass(monkeypatch):
    model, images, labels = problem()
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(torch.is_grad_enabled()))

    def passes(keep, times=1):
        step = LargeBatch(model, rg.FastAPLoss(), 4, keep)
        for _ in range(times):
            calls.clear()
            step(images, labels)
        return len(calls)

    chunks = -(-ITEMS // 4)
    assert [passes(keep) for keep in (0, 1, 4, 99)] == [2 * chunks, 2 * chunks - 1, 2 * chunks - 4, chunks]
    assert passes("auto") == 2 * chunks - 1, "the first step keeps one chunk to measure it"
    assert passes("auto", times=2) == chunks, "there is room for chunks of a few kilobytes"
    monkeypatch.setattr(activation_budget, "available_bytes", lambda device: None)
    assert passes("auto", times=2) == 2 * chunks
    monkeypatch.setattr(activation_budget, "available_bytes", lambda device: 10)
    assert passes("auto", times=2) == 2 * chunks


def test_auto_keeps_what_fits(monkeypatch):
    model, images, labels = problem()
    step = LargeBatch(model, rg.FastAPLoss(), 4, "auto")
    step(images, labels)
    ((_, graph),) = step._budget._measured.values()
    # of one chunk at least: two layers of 12 activations for 4 images in float64, masks, and the images
    assert 4 * 8 * (12 + 12) <= graph <= 20 * 4 * 8 * (12 + 12)
    monkeypatch.setattr(activation_budget, "available_bytes", lambda device: 2 * 3.5 * graph)
    assert step._budget.count(step._signature(images), 6, torch.device("cpu")) == 3


def live_norm(count=1):
    norms = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(count)]
    return nn.Sequential(*norms, nn.Linear(6, 4)).double()


def test_live_batch_norm_is_refused_by_name():
    _, images, labels = problem()
    model = live_norm(5)
    step = LargeBatch(model, rg.FastAPLoss(), 4)
    with pytest.raises(
        ValueError, match=r"0\.1, 1\.1, 2\.1 and 2 more would normalise.* Call \.eval\(\).*--batch-norm frozen.*GroupNorm"
    ):
        step(images, labels)
    before = copy.deepcopy(model.state_dict())
    LargeBatch(model.eval(), rg.FastAPLoss(), 4)(images, labels)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    # statistics of the batch are used in evaluation mode too if none are tracked
    untracked = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4)).double().eval()
    with pytest.raises(ValueError, match="LargeBatch: 0 would"):
        LargeBatch(untracked, rg.FastAPLoss(), 4)(images, labels)


def test_live_batch_norm_is_allowed_in_one_chunk():
    _, images, labels = problem()
    model, loss = live_norm(), rg.FastAPLoss()
    other = copy.deepcopy(model)
    loss(other(images), labels).backward()
    LargeBatch(model, loss, 0)(images, labels)
    torch.testing.assert_close(gradients(model), gradients(other), rtol=1e-10, atol=1e-12)
    assert torch.equal(model[0][1].running_mean, other[0][1].running_mean), "one update per step"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), -1), "chunk_size must be at least 0, got -1"),
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), 4, -1), "keep must be at least 0, got -1"),
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), 4)(x, y[1:]), "labels must be one per image, 22, got 21"),
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), 4)(x[:0], y[:0]), "at least one image, got none"),
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), 4)([x, x[1:]], y), "share their first dimension, got 21, 22"),
        (lambda m, x, y: LargeBatch(m, rg.FastAPLoss(), 4)("images", y), "share their first dimension, got no tensor"),
        (
            lambda m, x, y: LargeBatch(m, rg.FastAPLoss(reduction="none"), 4)(x, y),
            r"one value for the batch, got shape \(22,\)",
        ),
        (lambda m, x, y: LargeBatch(lambda_model(), rg.FastAPLoss(), 4)(x, y), r"must return embeddings \[4, dimensions\]"),
    ],
)
def test_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(*problem())


def lambda_model():
    class Summed(nn.Module):
        def forward(self, x):
            return x.sum()

    return Summed()


def test_gradients_are_exchanged_once_and_right(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed puts its own in place and leaves it there
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, images, labels = problem()
        model.eval()
        loss = rg.FastAPLoss()
        _, wanted = plain_gradients(model, loss, images, labels, 4)
        model.zero_grad()
        wrapped = nn.parallel.DistributedDataParallel(model)
        exchanges = []

        def exchange(state, bucket):
            exchanges.append(bucket.buffer().clone())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, exchange)
        for keep in (0, 2, 99):
            wrapped.zero_grad()
            exchanges.clear()
            LargeBatch(wrapped, loss, 4, keep)(images, labels)
            assert len(exchanges) == 1, f"keep={keep}"
            torch.testing.assert_close(gradients(model), wanted, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(exchanges[0].norm(), wanted.norm())  # all chunks were in it
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp_is_told_when_to_exchange():
    model, images, labels = problem()
    told = []
    model.set_requires_gradient_sync = told.append
    LargeBatch(model, rg.FastAPLoss(), 8, 0)(images, labels)
    assert told[-3:] == [False, False, True]
    assert not any(told[:-1])


class TestCheck:
    def test_an_exact_step_is_exact_and_nothing_changes(self):
        model, images, labels = problem()
        model.first.weight.grad = torch.ones_like(model.first.weight)
        loss = rg.EmbeddingMemory(rg.FastAPLoss(), 2)
        loss(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 2)
        held, state = loss.past, torch.get_rng_state()
        report = LargeBatch(model, loss, 4).check(images, labels)
        assert report.exact
        assert report.cosine == pytest.approx(1, abs=1e-12)
        assert report.relative_error < 1e-12
        assert "all chunks kept alive" in report.explanation
        assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
        assert model.second.weight.grad is None
        assert torch.equal(torch.get_rng_state(), state)
        assert len(loss.past) == 1
        assert torch.equal(loss.past[0][0], held[0][0])
        model.eval()
        assert "the whole batch at once" in str(LargeBatch(model, loss, 4).check(images, labels))

    def test_live_batch_norm_is_named_and_measured(self):
        _, images, labels = problem()
        model = live_norm()
        mean = model[0][1].running_mean.clone()
        report = LargeBatch(model, rg.FastAPLoss(), 4).check(images, labels)
        assert not report.exact
        assert report.cosine < 0.99
        assert "Batch normalisation uses the statistics of a chunk, put it in eval mode: 0.1" in report.explanation
        assert str(report).startswith("LargeBatch is NOT the gradient of the whole batch: cosine 0.")
        assert torch.equal(model[0][1].running_mean, mean)

    def test_other_dependence_on_the_chunk_is_noticed(self):
        class Centred(nn.Linear):
            def forward(self, x):
                return super().forward(x - x.mean(dim=0))

        _, images, labels = problem()
        report = LargeBatch(Centred(6, 4).double(), rg.FastAPLoss(), 4).check(images, labels)
        assert not report.exact
        assert "depends on the other images of its chunk" in report.explanation

    def test_a_generator_of_its_own_is_noticed(self):
        class Noisy(nn.Linear):
            own = torch.Generator()

            def forward(self, x):
                return super().forward(x) + torch.randn(len(x), 4, generator=self.own, dtype=x.dtype)

        _, images, labels = problem()
        report = LargeBatch(Noisy(6, 4).double(), rg.FastAPLoss(), 4).check(images, labels)
        assert not report.exact
        assert "differently each time from the same random state" in report.explanation

    def test_state_in_buffers_is_noticed(self):
        class Counting(nn.Linear):
            def __init__(self):
                super().__init__(6, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls += 1
                return super().forward(x) * self.calls

        _, images, labels = problem()
        model = Counting().double()
        report = LargeBatch(model, rg.FastAPLoss(), 4).check(images, labels)
        assert not report.exact
        assert "changes buffers, and there are two for each chunk: calls" in report.explanation
        assert model.calls == 0

    def test_a_model_without_parameters_is_refused(self):
        _, images, labels = problem()
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            LargeBatch(nn.Identity(), rg.FastAPLoss(), 4).check(images, labels)


def test_shrinking():
    step = LargeBatch(Recurrent(), rg.FastAPLoss(), 0, keep=2)
    said = []
    while (remedy := step.shrink(ITEMS)) is not None:
        said.append(remedy)
    assert said[0] == "no chunk is kept any more"
    assert said[1:3] == ["chunk_size 22 -> 11", "chunk_size 11 -> 6"]
    assert step.chunk_size == 1


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="memory is read from /proc/meminfo")  # noqa: PTH110
def test_available_memory_is_plausible():
    from rankgrad._device import available_bytes

    assert 2**20 < available_bytes(torch.device("cpu")) < 2**50
