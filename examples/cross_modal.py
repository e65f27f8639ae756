"""Train two towers, as for images and captions, so that each finds its partner in both directions.

python examples/cross_modal.py
"""

import argparse

import torch
from torch import nn

import rankgrad as rg


def make_pairs(items: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy views of the same hidden vectors, of 24 and 40 dimensions."""
    hidden = torch.randn(items, 8, generator=generator)
    mixing = torch.Generator().manual_seed(1)
    first, second = torch.randn(8, 24, generator=mixing), torch.randn(8, 40, generator=mixing)
    noise = (0.1 * torch.randn(items, size, generator=generator) for size in (24, 40))
    return tuple(hidden @ view + each for view, each in zip((first, second), noise, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    image_tower = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
    text_tower = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW([*image_tower.parameters(), *text_tower.parameters()], lr=3e-3)
    loss = rg.both_ways(rg.SmoothAPLoss(tau=0.05))
    ids = torch.arange(256)
    for _ in range(options.steps):
        images, texts = make_pairs(len(ids), generator)
        value = loss(image_tower(images), text_tower(texts), ids)  # image to text, text to image
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    with torch.inference_mode():
        images, texts = make_pairs(1000, generator)
        a, b, ids = image_tower(images), text_tower(texts), torch.arange(1000)
    for name, queries, gallery in (("image to text", a, b), ("text to image", b, a)):
        result = rg.evaluate(queries, ids, gallery, ids)
        print(f"{name}: R@1 {result['R@1']:.3f}, MRR {result['MRR']:.3f}")


if __name__ == "__main__":
    main()
