"""Several processes with the loss and gradient of one: each ranks its own queries against the embeddings of all.

torchrun --nproc-per-node 2 examples/distributed.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankgrad as rg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device))
    loss = rg.DistributedRankLoss(rg.RecallAtKLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    centres = 2 * torch.randn(32, 16)
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        # every process draws the same global batch and takes its shard
        labels = torch.arange(128) % 32
        items = centres[labels] + torch.randn(128, 16, generator=generator)
        shard = slice(rank * 128 // size, (rank + 1) * 128 // size)
        value = loss(model(items[shard].to(device)), labels[shard].to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss of the global batch {value.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
