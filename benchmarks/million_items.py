"""One training step on a batch of a million items: embedded in chunks, ranked as one list, gradient checked on a sample.

    python -m benchmarks.million_items --csv million.csv
    python -m benchmarks.million_items --items 4096 --device cpu        # shows that it works

A small convolutional network embeds images of random pixels, `LargeBatch` keeps the embeddings and no activations, and
`RecallAtKLoss` ranks every item among all others. The gradient is checked on a sample of queries: with weights that leave only
those in the mean, that of all embeddings is compared with dense computations in float64 and float32.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import rankgrad as rg
from benchmarks.csv_rows import append_csv
from benchmarks.measure import peak_memory, provenance
from rankgrad._messages import format_bytes

PER_CLASS = 4
# items of a first step, which compiles the kernels: more than CUDA graphs are recorded for
WARM_UP = 32768
# the gradient of "high" may be this many times as far from float64 as that of plain torch in float32
WORSE_AT_MOST = 3


class SmallNetwork(nn.Module):
    """Bytes [B, 3, S, S] -> embeddings [B, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.LayerNorm(1024, bias=False), nn.Linear(1024, dim, bias=False),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images.float() / 127.5 - 1)
        return found


@dataclass(frozen=True)
class Sampled:
    """Loss of the sampled queries, and its gradient by all embeddings."""

    loss: Tensor
    gradient: Tensor

    def errors(self, reference: "Sampled") -> dict[str, float]:
        """Relative errors against a computation in float64."""
        gradient = (self.gradient - reference.gradient).norm() / reference.gradient.norm()
        return {
            "loss_error": float((self.loss - reference.loss).abs() / reference.loss.abs()),
            "gradient_error": float(gradient),
        }


def ranked(loss: rg.RankLoss, embeddings: Tensor, labels: Tensor, sample: Tensor) -> Sampled:
    """By the loss, with weights that are 0 for all other queries."""
    weights = torch.zeros(len(labels), device=labels.device)
    weights[sample] = 1
    leaf = embeddings.detach().clone().requires_grad_()
    value = loss(leaf, labels, weights=weights)
    return Sampled(value.detach(), torch.autograd.grad(value, leaf)[0])


def dense(embeddings: Tensor, labels: Tensor, sample: Tensor) -> Sampled:
    """By all scores of these queries, in the precision of the embeddings."""
    leaf = embeddings.detach().clone().requires_grad_()
    rows = nn.functional.normalize(leaf)
    scores = rows[sample] @ rows.t()
    others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, sample[:, None], False)
    relevance = (labels[sample, None] == labels) & others
    value = rg.RecallAtKLoss(backend="tiled").from_scores(scores, relevance, candidates=others)
    return Sampled(value.detach(), torch.autograd.grad(value, leaf)[0])


def synthetic_images(labels: Tensor, size: int) -> Tensor:
    """Bytes [B, 3, size, size]: images of a class share what a small network sees, coarse blocks, and have noise over them."""
    blocks = torch.randint(0, 200, (int(labels[-1]) + 1, 3, 4, 4), dtype=torch.uint8, device=labels.device)
    images = blocks[labels].repeat_interleave(size // 4, 2).repeat_interleave(size // 4, 3)
    images += torch.randint(0, 56, images.shape, dtype=torch.uint8, device=labels.device)
    return images


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints time, memory and errors; returns 1 if the gradient is worse than float32 explains."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million_items", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=2**20, help="items in the batch [1048576]")
    parser.add_argument("--dim", type=int, default=512, help="dimensions of an embedding [512]")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image [32]")
    parser.add_argument("--chunk-size", type=int, default=16384, help="images in a pass of the network [16384]")
    parser.add_argument("--sample", type=int, default=16, help="queries whose gradient is checked [16]")
    parser.add_argument("--device", default="cuda", help="where to compute [cuda]")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    torch.manual_seed(0)
    labels = torch.arange(given.items, device=device) // PER_CLASS
    images = synthetic_images(labels, given.size)
    model = SmallNetwork(given.dim).to(device)
    with torch.no_grad():
        embeddings = torch.cat([model(chunk) for chunk in images.split(given.chunk_size)])
    sample = torch.randperm(given.items, device=device)[: given.sample]
    reference = dense(embeddings.double(), labels, sample)
    plain = dense(embeddings, labels, sample).errors(reference)
    embeddings = embeddings.cpu()  # out of the way of the steps
    errors: dict[str, float] = {}
    for precision in ("high", "fast"):
        loss = rg.RecallAtKLoss()
        loss.precision = precision
        step = rg.LargeBatch(model, loss, given.chunk_size, keep=0)
        step(images[:WARM_UP], labels[:WARM_UP])
        model.zero_grad()
        value, seconds, memory = _timed(step, images, labels, device)
        told = (
            f"{given.items:,} items, {precision}: {seconds:.2f} s, {format_bytes(memory)} beyond the images, loss {value:.4f}"
        )
        print(told, flush=True)
        row = {
            "items": given.items, "dim": given.dim, "image_side": given.size, "chunk_size": given.chunk_size,
            "precision": precision, "seconds": f"{seconds:.3f}", "peak_bytes": memory, "loss": f"{value:.6f}",
            "sample": given.sample,
        }  # fmt: skip
        checked = precision == "high"  # the error of "fast" is float16's, which a smaller batch shows as well
        if checked:
            errors = ranked(loss, embeddings.to(device), labels, sample).errors(reference)
            print(
                f"{given.sample} queries against float64: gradient {errors['gradient_error']:.1e} relative error "
                f"(dense in float32: {plain['gradient_error']:.1e})",
                flush=True,
            )
        for name, error in errors.items():
            row |= {name: f"{error:.2e}" if checked else "", f"float32_{name}": f"{plain[name]:.2e}" if checked else ""}
        if given.csv:
            append_csv(given.csv, [provenance(device) | row])
    return 0 if errors["gradient_error"] < WORSE_AT_MOST * plain["gradient_error"] else 1


def _timed(step: rg.LargeBatch, images: Tensor, labels: Tensor, device: torch.device) -> tuple[float, float, int]:
    """Loss, seconds and peak memory of a step, read when the GPU has finished it."""
    values: list[float] = []
    began = time.perf_counter()
    memory = peak_memory(lambda: values.append(float(step(images, labels))), device)
    return values[0], time.perf_counter() - began, memory


if __name__ == "__main__":
    raise SystemExit(main())
