"""Distractors: items with `ignore_label` are candidates of everyone and relevant to no one."""

import pytest
import torch

import rankgrad

LOSSES = [rankgrad.RecallAtKLoss, rankgrad.FastAPLoss, rankgrad.RamboRecallLoss]


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, labels with distractors of -1, and labels in which every distractor has a class of its own."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (24,), generator=rng)
    labels[::4] = -1
    alone = torch.where(labels == -1, 100 + torch.arange(24), labels)
    return torch.randn(24, 6, generator=rng).to(dtype), labels, alone


def value_and_gradient(loss, x, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    value = loss(leaf, *arguments, **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("tile", [512, 5])
def test_a_distractor_is_a_class_of_one(make, tile, monkeypatch):
    monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: tile)
    x, labels, alone = batch()
    ours, plain = make(ignore_label=-1), make()
    torch.testing.assert_close(value_and_gradient(ours, x, labels), value_and_gradient(plain, x, alone))
    assert ours.used_queries == plain.used_queries < 24
    assert not torch.isclose(ours(x, labels), make()(x, labels))


def test_distractors_among_references_and_their_copies_among_queries():
    x, labels, alone = batch()
    ours, plain = rankgrad.SmoothAPLoss(ignore_label=-1), rankgrad.SmoothAPLoss()
    # a distractor is not relevant to its own copy either
    other = torch.where(labels == -1, 200 + torch.arange(24), labels)
    torch.testing.assert_close(
        value_and_gradient(ours, x, labels, x + 0.1, labels), value_and_gradient(plain, x, alone, x + 0.1, other)
    )


def test_simix_mixes_no_distractors():
    x, labels, alone = batch(torch.float32)
    values = []
    for options, given in (({"ignore_label": -1}, labels), ({}, alone)):
        loss = rankgrad.SiMix(rankgrad.SmoothAPLoss(**options), torch.Generator().manual_seed(1))
        values.append(value_and_gradient(loss, x, given))
    torch.testing.assert_close(values[0], values[1])
