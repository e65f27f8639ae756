"""Products of float32 matrices, on a CPU by the library that is faster on it.

torch multiplies by MKL, which uses the 512-bit instructions of Intel's processors only: on two cores of an AMD EPYC of 2024 it
reaches 236 GFLOP/s, and oneDNN, which torch brings along for networks, 530. The choice depends on the machine and the version
of oneDNN alone, not on a timing or on the number of rows: a run that is resumed has to go on to the same bits, and equal
embeddings have to have equal scores, in whatever products they are.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CPU_INFO = Path("/proc/cpuinfo")

# Most dimensions of a score that oneDNN adds up one after the other. More of them in a row are rounded more often: with 512
# dimensions the error of a score is 2.2 times MKL's, in sums of 128 it is 0.8 times MKL's.
SUMMED = 128

# oneDNN compiles a product for each shape, which takes longer than the product and stays in memory, about 1 MB: with classes of
# any size no tile would be like another one. A product of a single row would be summed in another order, too.
STEP = 64

# Fewer scores, or a product of fewer multiplications, are done before oneDNN has looked up how to do them.
FEW_SCORES = 2**16
FEW_MULTIPLICATIONS = 2**22


def dot_products(queries: Tensor, candidates: Tensor, *, out: Tensor | None = None, alone: bool = False) -> Tensor:
    """`queries @ candidates.t()`, in `out` if that saves memory.

    `alone`: they are not compared with scores of other products, so that the choice may depend on their number.
    """
    if not _prefers_onednn(queries) or (alone and len(queries) * len(candidates) < FEW_SCORES):
        return torch.mm(queries, candidates.t(), out=out)
    pairs = zip(queries.split(SUMMED, dim=1), candidates.split(SUMMED, dim=1), strict=True)
    total = _onednn(*next(pairs))
    for pair in pairs:
        total = torch.add(total, _onednn(*pair), out=total if out is None else out)
    return total


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`."""
    if not _prefers_onednn(left) or left.numel() * right.shape[1] < FEW_MULTIPLICATIONS:
        return left @ right
    return _onednn(left, right.t())


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add `left @ right` to `total`."""
    return total.add_(product(left, right)) if _prefers_onednn(left) else total.addmm_(left, right)


def _prefers_onednn(matrix: Tensor) -> bool:
    """Whether products of such a matrix are made by oneDNN."""
    return matrix.dtype == torch.float32 and matrix.device.type == "cpu" and _is_faster()


@cache
def _is_faster() -> bool:
    """Whether oneDNN has instructions for this processor that MKL does not use."""
    backends: Any = torch.backends
    return (
        backends.mkl.is_available()
        and backends.mkldnn.is_available()
        and backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _is_amd()
        and _sums_alike()
    )


@torch.no_grad()
def _sums_alike() -> bool:
    """Whether oneDNN gives a score the same bits in products of all shapes and at all places; 3.7 does not without AVX-512."""
    # whatever the caller has set as default
    rows = torch.randn(STEP, SUMMED, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return all(
        torch.equal(_onednn(left.repeat(down, 1), left.repeat(across, 1)), _onednn(left, left).repeat(down, across))
        for left in (rows[:, : SUMMED // 2], rows)
        for down, across in ((8, 8), (1, 8), (3, 1))
    )


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return "AuthenticAMD" in platform.processor()


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.t()`."""
    rows, columns = len(left), len(right)
    left, right = _in_steps(left), _in_steps(right)
    # torch's public name for this, linear, leads to MKL
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left.contiguous(), right, None, "none", [], "")  # noqa: SLF001
    return found if found.shape == (rows, columns) else found[:rows, :columns].contiguous()


def _in_steps(matrix: Tensor) -> Tensor:
    """With zeros up to a multiple of STEP in both dimensions, in the order of a matrix or of its transpose.

    With other strides oneDNN takes a thousand times as long.
    """
    rows, columns = matrix.shape
    if rows % STEP or columns % STEP:
        return torch.nn.functional.pad(matrix, (0, -columns % STEP, 0, -rows % STEP))
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()
