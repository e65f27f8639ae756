"""A loop of Hugging Face accelerate in which all processes rank one batch together.

accelerate launch --num_processes 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankgrad as rg
from rankgrad.data.samplers import ClassBalanced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=options.cpu)
    torch.manual_seed(0)
    labels = torch.arange(1024) % 32
    items = 2 * torch.randn(32, 16)[labels] + torch.randn(1024, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # each process takes every n-th batch of 64, together one of 64 n
    sampler = ClassBalanced(labels, batch_size=64, per_class=4)
    loader = DataLoader(TensorDataset(items, labels), batch_sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # the plain loss would rank the batch of each process on its own
    loss = rg.DistributedRankLoss(rg.RecallAtKLoss())
    for epoch in range(options.epochs):
        for batch, classes in loader:
            value = loss(model(batch), classes)
            optimizer.zero_grad()
            accelerator.backward(value)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}: loss of the global batch {value.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
