"""What a loss takes of memory by kind of relevance, measured in a process of its own, which imports this file by its name."""

import torch
from benchmarks.measure import peak_memory

import rankgrad as rg


def bytes_taken(items: int) -> dict[str, int]:
    """Forward and backward with classes of about eleven, and with two labels each that six items share."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(items, 64, generator=rng, requires_grad=True)
    given = {
        "labels": torch.randint(items // 11, (items,), generator=rng),
        "pairs": rg.Pairs.from_multilabel(torch.randint(items // 3, (items, 2), generator=rng).tolist()),
    }
    assert 9 < len(given["pairs"].query) / items < 13
    loss = rg.SmoothAPLoss()
    few = torch.arange(600)
    loss(x[:600], few // 2).backward()  # loads what is loaded once
    loss(x[:600], rg.Pairs(few, few ^ 1)).backward()
    return {kind: peak_memory(lambda each=each: loss(x, each).backward(), torch.device("cpu")) for kind, each in given.items()}
