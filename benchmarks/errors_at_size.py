"""`python -m benchmarks.errors_at_size`: errors of the kernels against float64 for a few queries among very many candidates.

With many relevant items the kernels of sigmoids put candidates on a grid in place of comparing each pair. Both ways are shown,
beside plain torch in float32: of the value, relative of the gradient of all queries, of the worst query, and of the candidates.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import provenance
from benchmarks.presets import PRESETS

CANDIDATES = "2048,65536,1048576"
LOSSES = "recall_at_k,smooth_ap"
WAYS = {"each pair": 10**9, "grid": 1}  # positives of a query from which on there is a grid

Gradients = tuple[Tensor, Tensor, Tensor]  # value, and gradients of queries and candidates


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for every loss, number of candidates, precision and way."""
    options = _options(arguments)
    device = torch.device(options.device)
    for count in map(int, options.candidates.split(",")):
        batch = make_gallery(options.queries, options.relevant, count, options.dim, device)
        for loss in options.losses.split(","):
            rows = list(_rows(loss, batch))
            print(f"\n{loss}, {options.queries} queries, {options.relevant} relevant among {count:,} candidates")
            print(text_table(rows), flush=True)
            if options.csv:
                shape = {"loss": loss, "candidates": count, "queries": options.queries, "relevant": options.relevant}
                append_csv(options.csv, [provenance(device) | shape | {"d": options.dim} | row for row in rows])
    return 0


def make_gallery(queries: int, relevant: int, candidates: int, dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """Queries and candidates with their labels. Relevant candidates lie around a query's centre, the others anywhere."""
    draws = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draws)

    centres = normal(queries, dim)
    labels = torch.arange(queries, device=device)
    others = candidates - queries * relevant
    if others < 0:
        raise ValueError(f"{queries} queries with {relevant} relevant candidates each need more than {candidates} candidates")
    gallery = torch.cat(((centres[:, None] + normal(queries, relevant, dim)).view(-1, dim), normal(others, dim)))
    gallery_labels = torch.cat((labels.repeat_interleave(relevant), torch.arange(queries, queries + others, device=device)))
    return centres + normal(queries, dim), labels, gallery, gallery_labels


def _rows(loss: str, batch: tuple[Tensor, ...]) -> Iterator[dict[str, str]]:
    from rankgrad.ops.triton import embeddings as kernels

    exact = _gradients(loss, batch, torch.float64, backend="tiled")
    yield {"precision": "float32", "way": "torch"} | _errors(_gradients(loss, batch, backend="tiled"), exact)
    for precision in ("high", "fast"):
        for way, many in WAYS.items():
            with patch.object(kernels, "GRID_FROM", many):
                found = _gradients(loss, batch, backend="triton", precision=precision, cuda_graphs=False)
            yield {"precision": precision, "way": way} | _errors(found, exact)


def _gradients(
    loss: str, batch: tuple[Tensor, ...], dtype: torch.dtype = torch.float32, *, backend: str, **settings: Any
) -> Gradients:
    queries, labels, gallery, gallery_labels = batch
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (queries, gallery)]
    module = PRESETS[loss](backend)
    for name, value in settings.items():
        setattr(module, name, value)
    value = module(leaves[0], labels, leaves[1], gallery_labels)
    d_queries, d_candidates = torch.autograd.grad(value, leaves)
    return value.detach().double(), d_queries.double(), d_candidates.double()


def _errors(found: Gradients, exact: Gradients) -> dict[str, str]:
    value, *gradients = (one - other for one, other in zip(found, exact, strict=True))
    sizes = [gradient.norm().clamp(min=1e-300) for gradient in exact[1:]]
    rows = gradients[0].norm(dim=1) / exact[1].norm(dim=1).clamp(min=1e-300)
    errors = {
        "value": value.abs(),
        "gradient of queries": gradients[0].norm() / sizes[0],
        "of the worst": rows.max(),
        "of candidates": gradients[1].norm() / sizes[1],
    }
    return {name: f"{float(error):.1e}" for name, error in errors.items()}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.errors_at_size", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--candidates", default=CANDIDATES, metavar="N,N", help="default: %(default)s")
    add("--losses", default=LOSSES, metavar="A,B", help="default: %(default)s")
    add("--queries", type=int, default=48, help="default: %(default)s")
    add("--relevant", type=int, default=40, help="relevant candidates of a query (default: %(default)s)")
    add("--dim", type=int, default=64, help="default: %(default)s")
    known = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=known, help="cuda, or cpu with TRITON_INTERPRET=1 (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
