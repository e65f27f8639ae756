"""One training step on a batch of a million items: embedded in chunks, ranked as one list, gradient checked on a sample.

    python -m benchmarks.million_items
    python -m benchmarks.million_items --items 4096 --device cpu        # shows that it works

A small convolutional network embeds images of random pixels, `LargeBatch` keeps the embeddings and no activations, and
`RecallAtKLoss` ranks every item among all others. The gradient is checked on a sample of queries: with weights that leave only
those in the mean, that of all embeddings is compared with a dense computation in float64.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import rankgrad as rg
from rankgrad._messages import format_bytes

PER_CLASS = 4


class SmallNetwork(nn.Module):
    """Bytes [B, 3, S, S] -> embeddings [B, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, dim),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images.float() / 127.5 - 1)
        return found


def sample_error(embeddings: Tensor, labels: Tensor, sample: Tensor) -> tuple[float, float]:
    """Relative error of loss and gradient of all embeddings, where only the sampled queries count."""
    weights = torch.zeros(len(labels), device=labels.device)
    weights[sample] = 1
    leaf = embeddings.detach().clone().requires_grad_()
    loss = rg.RecallAtKLoss()(leaf, labels, weights=weights)
    loss.backward()
    wide = embeddings.detach().double().requires_grad_()
    rows = nn.functional.normalize(wide)
    scores = rows[sample] @ rows.t()
    others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, sample[:, None], False)
    relevance = (labels[sample, None] == labels) & others
    reference = rg.RecallAtKLoss(backend="tiled").from_scores(scores, relevance, candidates=others)
    reference.backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    gradient = (leaf.grad.double() - wide.grad).norm() / wide.grad.norm()
    return float((loss - reference).detach().abs() / reference.detach().abs()), float(gradient)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints time, memory and errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million_items", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=2**20, help="items in the batch [1048576]")
    parser.add_argument("--dim", type=int, default=512, help="dimensions of an embedding [512]")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image [32]")
    parser.add_argument("--chunk-size", type=int, default=16384, help="images in a pass of the network [16384]")
    parser.add_argument("--sample", type=int, default=16, help="queries whose gradient is checked [16]")
    parser.add_argument("--device", default="cuda", help="where to compute [cuda]")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    torch.manual_seed(0)
    labels = torch.arange(given.items, device=device) // PER_CLASS
    # images of a class share what a small network sees: coarse blocks, and noise over them
    blocks = torch.randint(0, 200, (given.items // PER_CLASS + 1, 3, 4, 4), dtype=torch.uint8, device=device)
    images = blocks[labels].repeat_interleave(given.size // 4, 2).repeat_interleave(given.size // 4, 3)
    images += torch.randint(0, 56, images.shape, dtype=torch.uint8, device=device)
    model, loss = SmallNetwork(given.dim).to(device), rg.RecallAtKLoss()
    step = rg.LargeBatch(model, loss, chunk_size=given.chunk_size)
    step(images[: min(given.items, 4096)], labels[: min(given.items, 4096)])  # compiles
    base = _allocated(device)
    for precision in ("high", "fast"):
        loss.precision = precision
        model.zero_grad()
        began = time.perf_counter()
        value = float(step(images, labels))
        seconds = time.perf_counter() - began
        memory = "" if base is None else f", {format_bytes(torch.cuda.max_memory_allocated(device) - base)} beyond the images"
        gradient = float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)) ** 0.5
        print(
            f"{given.items:,} items, {precision}: {seconds:.2f} s, loss {value:.4f}, gradient {gradient:.2e}{memory}",
            flush=True,
        )
    with torch.no_grad():
        embeddings = torch.cat([model(chunk) for chunk in images.split(given.chunk_size)])
    sample = torch.randperm(given.items, device=device)[: given.sample]
    loss_error, gradient_error = sample_error(embeddings, labels, sample)
    print(f"{given.sample} queries against float64: loss {loss_error:.1e}, gradient {gradient_error:.1e} relative error")
    return 0 if gradient_error < 1e-3 else 1


def _allocated(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    raise SystemExit(main())
