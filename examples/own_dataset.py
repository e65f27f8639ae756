"""Train your own dataset and network with `rg.fit`: journal, checkpoints, validation, exact resume, batches of any size.

    python examples/own_dataset.py --out runs/mine              # stop it with Ctrl-C
    python examples/own_dataset.py --out runs/mine --resume     # ends with the weights of a run that was never stopped

The data are the built-in glyphs: a character is a class, and test characters are not among the training characters.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankgrad as rg
from rankgrad.data.glyphs import load_glyphs
from rankgrad.data.samplers import ClassBalanced


def dataset(split: str) -> TensorDataset:
    glyphs = load_glyphs(split)
    return TensorDataset(torch.from_numpy(glyphs.images)[:, None] / 255, torch.from_numpy(glyphs.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/own-dataset")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=384)
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = dataset("train"), dataset("test")
    loader = DataLoader(train, batch_sampler=ClassBalanced(train.tensors[1].numpy(), options.batch_size, per_class=4, seed=0))
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 64)
    )  # fmt: skip

    def validate(model: nn.Module) -> rg.Result:
        embeddings = torch.cat([model(part) for part in test.tensors[0].split(1000)])
        return rg.evaluate(embeddings, test.tensors[1])

    settings = rg.TrainSettings(epochs=options.epochs, lr=2e-3, chunk_size=128)
    result = rg.fit(
        model, rg.RecallAtKLoss(), loader, settings, options.out, evaluators={"validation": validate}, select="validation",
        resume=options.resume,
    )  # fmt: skip
    print(f"{result.reason} after {result.step} steps: validation R@1 {result.metrics['validation']['R@1']:.3f}")


if __name__ == "__main__":
    main()
