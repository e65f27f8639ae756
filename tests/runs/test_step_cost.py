"""Plans: stages, chunk sizes, what fits, and that measuring leaves no trace. And embeddings of many images."""

import copy

import pytest
import torch
from torch import nn
from train.tiny_loop import Vectors, batch, network, remembering

import rankgrad as rg
from rankgrad.runs import step_cost
from rankgrad.runs.embedding import embed
from rankgrad.runs.step_cost import measure_step
from rankgrad.train.settings import TrainSettings

SETTINGS = TrainSettings(epochs=1)


def make_batch():
    return batch(0, 0)[1:]


def test_a_plan_measures_and_chooses():
    made = measure_step(network(), rg.FastAPLoss(), make_batch, SETTINGS, steps_per_epoch=10)
    assert [cost.chunk_size for cost in made.tried] == [6, 12, 24]
    assert [cost.chunks for cost in made.tried] == [4, 2, 1]
    assert all(cost.measured and cost.memory > 0 and cost.forward > 0 for cost in made.tried)
    assert made.tried[-1].without_graph == 0
    assert made.tried[0].with_graph == 4 * made.tried[0].forward_backward
    # twice the images, twice the activations: nothing fixed is in the count
    assert made.tried[1].memory == pytest.approx(2 * made.tried[0].memory, rel=0.05)
    parameters = sum(p.numel() for p in network().parameters())
    assert 3 * 4 * parameters <= made.optimizer_memory <= 3 * 4 * parameters + 100  # gradient, two moments, step counts
    text = str(made)
    for word in ("load", "forward without graph", "loss and its gradient", "forward and backward", "optimizer", "<- chosen"):
        assert word in text
    assert "an epoch of 10 steps takes" in text


def test_measuring_leaves_no_trace():
    model, loss = network(), remembering()
    model.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure_step(model, loss, make_batch, SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert loss.past == []
    assert not model.training


def test_what_does_not_fit_is_not_chosen(monkeypatch):
    needed = {cost.chunk_size: cost.memory for cost in measure_step(network(), rg.FastAPLoss(), make_batch, SETTINGS).tried}
    optimizer = measure_step(network(), rg.FastAPLoss(), make_batch, SETTINGS).optimizer_memory
    monkeypatch.setattr(step_cost, "available_bytes", lambda device: 2 * (needed[12] + 10 + optimizer))
    made = measure_step(network(), rg.FastAPLoss(), make_batch, SETTINGS)
    assert [cost.fits(made.available) for cost in made.tried] == [True, True, False]
    assert made.chunk_size in (6, 12)
    assert "does not fit" in str(made)


def test_impatience_estimates():
    made = measure_step(network(), rg.FastAPLoss(), make_batch, SETTINGS, patience=1e-9)
    assert [cost.measured for cost in made.tried] == [True, False, False]
    assert made.tried[2].forward == pytest.approx(4 * made.tried[0].forward)
    assert "estimated" in str(made)


def test_live_batch_norm_leaves_no_choice():
    model = nn.Sequential(nn.BatchNorm1d(10), network())
    made = measure_step(model, rg.FastAPLoss(), make_batch, SETTINGS)
    assert [cost.chunk_size for cost in made.tried] == [24]
    assert model[0].num_batches_tracked == 0


class Ordered(Vectors):
    """Every index once, in an order of its own."""

    def iterate(self, start):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
        for step, indices in enumerate(order.split(6)):
            yield step, indices, rows_of(indices), indices


def rows_of(indices):
    return torch.arange(200.0).view(20, 10)[indices] / 100


def test_embed_puts_every_image_in_its_row(capsys):
    model = network()
    found = embed(model, Ordered(4))
    assert model.training
    torch.testing.assert_close(found, model.eval()(rows_of(torch.arange(20))).detach())
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_embed_halves_what_does_not_fit():
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.seen = network(), []

        def forward(self, images):
            self.seen.append(len(images))
            if len(images) > 2:
                raise torch.OutOfMemoryError("no memory left, said the test")
            return self.body(images)

    model = Limited()
    torch.testing.assert_close(embed(model, Ordered(4)), model.body.eval()(rows_of(torch.arange(20))).detach())
    assert max(model.seen) == 6


def test_embed_refuses_gaps():
    class Gap(Ordered):
        def iterate(self, start):
            for step, indices, images, labels in super().iterate(start):
                yield step, indices + 1, images, labels

    with pytest.raises(ValueError, match="visit each index from 0 to 19 once"):
        embed(network(), Gap(4))
