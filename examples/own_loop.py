"""Train with a rank loss in a plain PyTorch loop.

    python examples/own_loop.py

The data are the built-in glyphs: a character is a class, and test characters are not among the training characters.
"""

import argparse

import torch
from torch import nn

import rankgrad as rg
from rankgrad.data.glyphs import load_glyphs
from rankgrad.data.samplers import ClassBalanced


def encoder() -> nn.Module:
    layers = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 64))


def as_input(images) -> torch.Tensor:
    return torch.from_numpy(images)[:, None] / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=384)
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = load_glyphs("train"), load_glyphs("test")
    sampler = ClassBalanced(train.labels, options.batch_size, per_class=4, seed=0)
    model, loss = encoder(), rg.RecallAtKLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in sampler:
            value = loss(model(as_input(train.images[batch])), torch.from_numpy(train.labels[batch]))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        with torch.inference_mode():
            embeddings = torch.cat([model(part) for part in as_input(test.images).split(1000)])
        result = rg.evaluate(embeddings, torch.from_numpy(test.labels))
        print(f"epoch {epoch + 1}: loss {value.item():.3f}, test R@1 {result['R@1']:.3f}, mAP {result['mAP']:.3f}")


if __name__ == "__main__":
    main()
