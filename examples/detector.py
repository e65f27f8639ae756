"""Replace the classification loss of torchvision's Faster R-CNN by average precision.

    python examples/detector.py

The images are drawn shapes and the network is tiny; with real data use `build_detector("resnet50", classes=20, weights=...)`.
"""

import argparse

import torch

from rankgrad.detection import DetectionAPLoss, draw_shapes
from rankgrad.detection.faster_rcnn import build_detector, use_classification_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    scenes = draw_shapes("train", 4 * options.steps)
    detector = build_detector("tiny", classes=len(scenes.class_names), min_size=128, max_size=128, seed=0)
    use_classification_loss(detector, DetectionAPLoss())
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.02, momentum=0.9)
    detector.train()
    for step in range(options.steps):
        numbers = range(4 * step, 4 * (step + 1))
        images = [torch.from_numpy(scenes.load(i)).permute(2, 0, 1) / 255 for i in numbers]
        targets = [
            {"boxes": torch.from_numpy(scenes.scenes[i].boxes), "labels": torch.from_numpy(scenes.scenes[i].labels)}
            for i in numbers
        ]
        losses = detector(images, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 10.0)
        optimizer.step()
        if (step + 1) % 5 == 0:
            print(f"step {step + 1}: " + ", ".join(f"{name} {value.item():.3f}" for name, value in losses.items()))


if __name__ == "__main__":
    main()
