"""A run small enough to be killed often: random vectors, a network with dropout, a loss with a memory."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

import rankgrad as rg
from rankgrad.data.seeds import generator

CLASSES, PER_CLASS, WIDTH = 6, 4, 10


class Vectors:
    """Batches of noisy class centres; step s of epoch e is a function of (e, s)."""

    def __init__(self, length: int = 5, *, epoch: int = 0) -> None:
        self.length, self.epoch = length, epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step in range(start, self.length):
            yield step, *batch(self.epoch, step)


def batch(epoch: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    centres = torch.randn(CLASSES, WIDTH, generator=generator(0, "centres"))
    noise = torch.randn(len(labels), WIDTH, generator=generator(0, "noise", epoch, step))
    indices = torch.randint(1000, (len(labels),), generator=generator(0, "indices", epoch, step))
    return indices, centres[labels] + noise, labels


def network(*, dropout: float = 0.3, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8))


def remembering() -> rg.EmbeddingMemory:
    return rg.EmbeddingMemory(rg.RecallAtKLoss(), size=2)


@torch.no_grad()
def held_out(model: nn.Module) -> Mapping[str, float]:
    """R@1 of one batch that is never trained on, and by how much the cosines within classes exceed the others."""
    assert not model.training
    _, images, labels = batch(10**6, 0)
    embeddings = nn.functional.normalize(model(images), dim=1)
    scores = embeddings @ embeddings.t()
    scores.fill_diagonal_(-1)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    return {
        "R@1": float((labels[scores.argmax(dim=1)] == labels).float().mean()),
        "margin": float(scores[same].mean() - scores[labels[:, None] != labels].mean()),
    }
