"""A rank loss with the miners and reducers of pytorch-metric-learning, beside one of its own losses.

pip install 'rankgrad[pytorch-metric-learning]'
python examples/metric_learning.py
"""

import argparse

import torch
from pytorch_metric_learning import losses, miners
from torch import nn

import rankgrad as rg
from rankgrad.integrations.pytorch_metric_learning import pml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(64, 16, generator=generator)  # the first half of the classes trains, the other half tests
    labels = torch.arange(256) % 64
    items = 1.5 * centres[labels] + torch.randn(256, 16, generator=generator)
    train, test = labels < 32, labels >= 32
    miner = miners.BatchEasyHardMiner(pos_strategy="all", neg_strategy="all")

    candidates = {
        "triplet margin": (losses.TripletMarginLoss(), miners.TripletMarginMiner(type_of_triplets="semihard")),
        "Smooth-AP": (pml(rg.SmoothAPLoss()), None),
        "Smooth-AP, mined pairs": (pml(rg.SmoothAPLoss()), miner),
    }
    for name, (loss, miner) in candidates.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(options.steps):
            embeddings = model(items[train])
            pairs = miner(embeddings, labels[train]) if miner else None
            optimizer.zero_grad()
            loss(embeddings, labels[train], pairs).backward()
            optimizer.step()
        with torch.inference_mode():
            result = rg.evaluate(model(items[test]), labels[test])
        print(f"{name}: test mAP {result['mAP']:.3f}, R@1 {result['R@1']:.3f}")


if __name__ == "__main__":
    main()
