"""The loop, `LargeBatch` and `embed` with the package's own batches of pixels."""

import numpy as np
import pytest
import torch
from torch import nn

import rankgrad as rg
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_store import ImageBuffer
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import ClassBalanced, Sequential
from rankgrad.runs.embedding import embed
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

SIDE, CLASSES, PER_CLASS = 16, 6, 8
LABELS = np.repeat(np.arange(CLASSES), PER_CLASS)


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    patterns = torch.randint(90, 166, (CLASSES, 3, SIDE, SIDE))
    pixels = (patterns[torch.from_numpy(LABELS)] + torch.randint(-40, 40, (len(LABELS), 3, SIDE, SIDE))).to(torch.uint8)
    flat = torch.cat((pixels.flatten(), torch.zeros(SIDE, dtype=torch.uint8)))
    return ImageBuffer(flat, torch.full((len(LABELS), 2), SIDE))


def network():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 8))

        def forward(self, pixels):
            return nn.functional.normalize(self.body(pixels.float() / 128 - 1), dim=1)

    return Small()


def test_training_on_images_learns_and_resumes_exactly(images, tmp_path):
    def everything(model):
        batches = ImageBatches(images, LABELS, Sequential(len(LABELS), 20), Augment("center"), 14)
        embeddings = embed(model, batches, shown=False)
        scores = (embeddings @ embeddings.t()).fill_diagonal_(-2)
        return {"R@1": float(np.mean(LABELS[scores.argmax(dim=1).numpy()] == LABELS))}

    def train(folder, steps, *, resume=False):
        batches = ImageBatches(images, LABELS, ClassBalanced(LABELS, 24, 4, seed=1), Augment("random", flip=True), 14, seed=2)
        model = network()
        settings = TrainSettings(steps=steps, lr=1e-2, chunk_size=10, keep=1, evaluate_every=0)
        evaluators = {"validation": everything}
        outcome = fit(model, rg.FastAPLoss(), batches, settings, folder, evaluators=evaluators, resume=resume)
        # flatten and not view: training has put the convolution's weight into channels_last
        return torch.cat([p.detach().flatten() for p in model.parameters()]), outcome.metrics["validation"]["R@1"]

    untrained = everything(network())["R@1"]
    train(tmp_path / "a", 7)
    continued, _ = train(tmp_path / "a", 60, resume=True)
    whole, trained = train(tmp_path / "b", 60)
    assert torch.equal(continued, whole)
    assert trained > untrained + 0.15, (untrained, trained)
