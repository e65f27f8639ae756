"""Memory decides how large a chunk may be."""

from train.tiny_loop import batch, network

import rankgrad as rg
from rankgrad.train import activation_budget
from rankgrad.train.activation_budget import choose_chunk
from rankgrad.train.large_batch import LargeBatch


def test_memory_chooses_the_chunk(monkeypatch):
    model = network()
    _, images, _ = batch(0, 0)
    step = LargeBatch(model, rg.FastAPLoss(), 0)
    each = activation_budget.graph_bytes(step, images, 20) / 20
    chosen = []
    for fitting in (1000, 24, 23, 11, 5, 0):
        monkeypatch.setattr(activation_budget, "available_bytes", lambda device, n=fitting: int(2 * 1.5 * each * (n + 0.5)))
        chosen.append(choose_chunk(step, images))
    assert chosen == [0, 0, 12, 8, 5, 1]
    monkeypatch.setattr(activation_budget, "available_bytes", lambda device: None)
    assert choose_chunk(step, images) == 0
