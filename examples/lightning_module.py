"""A rank loss with large batches in Lightning, and retrieval metrics after every validation epoch.

pip install 'rankgrad[lightning]'
python examples/lightning_module.py
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankgrad as rg
from rankgrad.data.samplers import ClassBalanced
from rankgrad.integrations.lightning import RetrievalMetrics


class Model(LightningModule):
    """`LargeBatch` runs the backward pass itself, so optimisation is manual."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.large_batch = rg.LargeBatch(self.net, rg.RecallAtKLoss(), chunk_size=64)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.large_batch(*batch)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        items, labels = batch
        return {"embeddings": self.net(items), "labels": labels}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(512) % 32
    centres = torch.randn(32, 16, generator=generator)
    return TensorDataset(1.5 * centres[labels] + torch.randn(512, 16, generator=generator), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    train, validation = make_data(0), make_data(1)
    sampler = ClassBalanced(train.tensors[1], batch_size=128, per_class=4)
    metrics = RetrievalMetrics(metrics=["R@1", "mAP"])
    trainer = Trainer(
        max_epochs=options.epochs, callbacks=[metrics], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Model(), DataLoader(train, batch_sampler=sampler), DataLoader(validation, batch_size=256))
    print({name: f"{value:.3f}" for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
