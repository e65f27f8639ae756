"""Fine-tune a network of your own on a folder of images with a rank loss: photos/CLASS/image.jpg.

    python examples/own_images.py --data photos --network resnet50 --pretrained

Half of the classes train and the other half tests. Without arguments a few striped pictures are drawn and learned by a small
network. `rankgrad train --data photos` does this and more; here is what it takes in a loop of your own.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import rankgrad as rg
from rankgrad.data.samplers import ClassBalanced


def draw_stripes(folder: Path, classes: int = 40, per_class: int = 8) -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:40, :40]
    for label in range(classes):
        (folder / f"{label:02d}").mkdir(parents=True)
        for example in range(per_class):
            phase = rng.uniform(0, 6)
            stripes = np.sin(0.6 * (rows * np.cos(label) + columns * np.sin(label)) + phase)
            colours = rng.uniform(60, 180, 3)
            pixels = colours * (1 + 0.4 * stripes[..., None]) + rng.normal(0, 40, (40, 40, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{label:02d}" / f"{example}.png")


@torch.inference_mode()
def evaluate(model: torch.nn.Module, data: Subset, labels: torch.Tensor) -> rg.Result:
    model.eval()
    return rg.evaluate(torch.cat([model(images) for images, _ in DataLoader(data, batch_size=64)]), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with a folder of images for each class")
    parser.add_argument("--network", default="resnet10t.c3_in1k", help="a model of timm")
    parser.add_argument("--pretrained", action="store_true", help="start from published weights, which are downloaded")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as drawn:
        if options.data is None:
            draw_stripes(Path(drawn))
        cropped = [v2.RandomResizedCrop(options.size, scale=(0.5, 1)), v2.Resize((options.size, options.size))]
        views = [v2.Compose([v2.ToImage(), crop, v2.ToDtype(torch.float32, scale=True)]) for crop in cropped]
        train, test = (ImageFolder(options.data or drawn, transform=view) for view in views)
        labels = torch.tensor(train.targets)
        seen = labels < len(train.classes) // 2
        train, test = Subset(train, seen.nonzero()[:, 0].tolist()), Subset(test, (~seen).nonzero()[:, 0].tolist())

        model = timm.create_model(options.network, pretrained=options.pretrained, num_classes=64)
        print(f"before: test R@1 {evaluate(model, test, labels[~seen])['R@1']:.3f}")
        sampler = ClassBalanced(labels[seen], batch_size=4 * len(labels[seen].unique()), per_class=4)
        settings = rg.TrainSettings(epochs=options.epochs, lr=1e-3)
        rg.fit(model, rg.RecallAtKLoss(), DataLoader(train, batch_sampler=sampler), settings, Path(drawn) / "run")
        print(f"after:  test R@1 {evaluate(model, test, labels[~seen])['R@1']:.3f}")


if __name__ == "__main__":
    main()
