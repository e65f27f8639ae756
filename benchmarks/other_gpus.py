"""`python -m benchmarks.other_gpus`: the kernels compiled for GPUs that are not here, what they need and whether it fits.

The launches of every loss are recorded on a CPU, with the tiles that each GPU would get, and compiled for its architecture.
A row is a kernel: the most bytes of shared memory and the most registers that any of its variants takes, and the most bytes
of registers that a thread spills. Needs Triton and no GPU; the first run takes minutes, later ones read Triton's cache.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.csv_rows import append_csv, text_table
from benchmarks.presets import PRESETS
from benchmarks.synthetic import hard_batch
from rankgrad.ops.dry_run import dry_run

ITEMS, DIM = 512, 512
# few thresholds of a query, more, and so many that grids pay off
PER_CLASS = (4, 16, 64)


@dataclass(frozen=True)
class Card:
    """A GPU: its architecture, and the shared memory of a thread block there (from the CUDA C++ Programming Guide)."""

    name: str
    capability: int
    shared_kib: int

    @property
    def shared(self) -> int:
        return self.shared_kib * 1024


CARDS = (
    Card("A100", 80, 163),
    Card("RTX 3090, A10, A40", 86, 99),
    Card("RTX 4090, L4, L40", 89, 99),
    Card("H100, H200", 90, 227),
)


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments."""

    kernel: Any
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def source(self) -> tuple[Any, dict[str, int]]:
        """What Triton compiles for these arguments, and the options that are not arguments of the kernel."""
        from triton.compiler import ASTSource

        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments.get(parameter.name, parameter.default)
            if (
                parameter.is_constexpr
                or value is None
                or (type(value) is int and value == 1 and not parameter.do_not_specialize)
            ):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = _type_of(value)
            aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(index,)] = [["tt.divisibility", 16]]
        options = {name: value for name, value in self.arguments.items() if name in ("num_warps", "num_stages", "maxnreg")}
        return ASTSource(self.kernel, signature, constants, attributes), options

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that compile to the same."""
        return self.name, *(
            value
            if isinstance(value, (bool, int, float, str))
            else str(getattr(value, "block_shape", getattr(value, "dtype", value)))
            for _, value in sorted(self.arguments.items())
        )


def _type_of(value: Any) -> str:
    types = {
        torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1", torch.uint8: "*u8",
        torch.int32: "*i32", torch.int64: "*i64",
    }  # fmt: skip
    if isinstance(value, torch.Tensor):
        return types[value.dtype]
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"tensordesc<{types[value.base.dtype][1:]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


@contextmanager
def recorded(card: Card) -> Iterator[list[Launch]]:
    """Kernels are not run but noted, with the tiles of this card."""
    from rankgrad.ops.triton import embeddings
    from rankgrad.ops.triton.tiles import tile_within

    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        launches.append(Launch(kernel, arguments))

    def tile_for(tiles: Any, device: torch.device) -> dict[str, int]:
        return tile_within(tiles, card.shared)

    made = embeddings.FusedEmbeddingScores.__init__

    def make(source: Any, *positional: Any, **named: Any) -> None:
        made(source, *positional, **named)
        source.asm = True

    with (
        patch.object(embeddings, "tile_for", tile_for),
        patch.object(embeddings, "takes_descriptors", lambda device: card.capability >= 90),
        patch.object(embeddings.FusedEmbeddingScores, "__init__", make),
        patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),  # the kernels may be called on a CPU
        dry_run(note),
    ):
        yield launches


def launches_of(card: Card, losses: Sequence[str], dim: int = DIM) -> list[Launch]:
    """Each different launch of these losses once."""
    with recorded(card) as launches:
        for name in losses:
            for precision in ("fast", "high"):
                for per_class in PER_CLASS:
                    embeddings, labels = hard_batch(ITEMS, dim, per_class, device=torch.device("cpu"))
                    loss = PRESETS[name]("triton")
                    loss.precision = precision  # type: ignore[assignment]
                    loss(embeddings.requires_grad_(), labels)
    return list({launch.key: launch for launch in launches}.values())


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes of a multiprocessor."""

    shared: int
    registers: int
    spilled: int


def compiled(launch: Launch, card: Card) -> Needs:
    """Compile for the architecture of a card."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = launch.source()
    binary = triton.compile(source, target=GPUTarget("cuda", card.capability, 32), options=options)
    return Needs(binary.metadata.shared, *_registers(binary.asm["cubin"]))


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
        for launch in launches_of(card, given.losses.split(",")):
            if not re.search(given.kernels, launch.name):
                continue
            needs.setdefault(launch.name, []).append(compiled(launch, card))
        rows = [
            {
                "kernel": name, "variants": str(len(found)), "shared": str(max(n.shared for n in found)),
                "registers": str(max(n.registers for n in found)), "spilled": str(max(n.spilled for n in found)),
                "fits": "yes" if all(n.shared <= card.shared for n in found) else "no",
            }
            for name, found in sorted(needs.items())
        ]  # fmt: skip
        fits = fits and all(row["fits"] == "yes" for row in rows)
        print(f"\n{card.name}: sm_{card.capability}, {card.shared:,} bytes of shared memory")
        print(text_table(rows), flush=True)
        if given.csv:
            append_csv(
                given.csv, [{"card": card.name, "capability": card.capability, "limit": card.shared} | row for row in rows]
            )
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
