"""`python -m benchmarks.other_gpus`: the kernels compiled for GPUs that are not here, what they need and whether it fits.

The launches of every loss are recorded on a CPU, with the tiles that each GPU would get, and compiled for its architecture.
A row is a kernel: the most bytes of shared memory and the most registers that any of its variants takes, and the most bytes
of registers that a thread spills. Needs Triton and no GPU; the first run takes minutes, later ones read Triton's cache.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.csv_rows import append_csv, text_table
from benchmarks.presets import PRESETS
from benchmarks.synthetic import hard_batch
from rankgrad._gpu import Gpu

ITEMS, DIM = 512, 512
# few thresholds of a query, more, and so many that grids pay off
PER_CLASS = (4, 16, 64)


@dataclass(frozen=True)
class Card:
    """GPUs of one architecture."""

    name: str
    capability: str

    @property
    def gpu(self) -> Gpu:
        return Gpu.named(self.capability, caller="other_gpus")


CARDS = (
    Card("A100", "8.0"),
    Card("RTX 3090, A10, A40", "8.6"),
    Card("RTX 4090, L4, L40", "8.9"),
    Card("H100, H200", "9.0"),
    Card("B200", "10.0"),
    Card("RTX 5090", "12.0"),
)


def kernels_of(card: Card, losses: Sequence[str], pattern: str) -> list[Any]:
    """Each different kernel of these losses whose name the pattern finds, compiled for a card."""
    from rankgrad.ops.triton.absent_gpu import compiled_for

    def call() -> None:
        for name in losses:
            for precision in ("fast", "high"):
                for per_class in PER_CLASS:
                    embeddings, labels = hard_batch(ITEMS, DIM, per_class, device=torch.device("cpu"))
                    loss = PRESETS[name]("triton")
                    loss.precision = precision  # type: ignore[assignment]
                    loss(embeddings.requires_grad_(), labels)

    return compiled_for(card.gpu, call, pattern)


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes of a multiprocessor."""

    shared: int
    registers: int
    spilled: int


def needs_of(kernel: Any) -> Needs:
    """What it takes."""
    return Needs(kernel.metadata.shared, *_registers(kernel.asm["cubin"]))


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, check=True)
    found = dict(re.findall(r"\b(REG|LOCAL|STACK):(\d+)", told.stdout.decode()))
    return int(found["REG"]), int(found.get("LOCAL", 0)) + int(found.get("STACK", 0))


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for each card and kernel; returns 1 if one does not fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_gpus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", default=",".join(PRESETS), metavar="A,B", help="of %(default)s")
    parser.add_argument("--only", default="", metavar="NAME", help="cards whose name contains this")
    parser.add_argument("--kernels", default="", metavar="PATTERN", help="kernels whose name this regular expression finds")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    given = parser.parse_args(arguments)
    fits = True
    for card in (card for card in CARDS if given.only in card.name):
        needs: dict[str, list[Needs]] = {}
        for kernel in kernels_of(card, given.losses.split(","), given.kernels):
            needs.setdefault(kernel.metadata.name, []).append(needs_of(kernel))
        rows = [
            {
                "kernel": name, "variants": str(len(found)), "shared": str(max(n.shared for n in found)),
                "registers": str(max(n.registers for n in found)), "spilled": str(max(n.spilled for n in found)),
                "fits": "yes" if all(n.shared <= card.gpu.shared_memory for n in found) else "no",
            }
            for name, found in sorted(needs.items())
        ]  # fmt: skip
        fits = fits and all(row["fits"] == "yes" for row in rows)
        print(f"\n{card.name}: {card.gpu}, {card.gpu.shared_memory:,} bytes of shared memory")
        print(text_table(rows), flush=True)
        if given.csv:
            of_card = {"card": card.name, "capability": card.capability, "limit": card.gpu.shared_memory}
            append_csv(given.csv, [of_card | row for row in rows])
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
