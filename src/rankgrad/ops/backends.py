"""Which implementation runs. One decision in one place: an explicit request is honoured or refused, never replaced."""

import os
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from rankgrad.ops.rankers import Ranker

Backend = Literal["auto", "triton", "tiled", "reference"]
Precision = Literal["auto", "fast", "high"]
BACKENDS = ("auto", "triton", "tiled", "reference")
PRECISIONS = ("auto", "fast", "high")


def resolve(backend: Backend, scores_of: Tensor, ranker: Ranker, *, caller: str) -> Literal["triton", "tiled", "reference"]:
    """The backend for tensors such as `scores_of`. On a CPU the kernels run only on request, in Triton's interpreter."""
    if backend in ("tiled", "reference") or (backend == "auto" and not scores_of.is_cuda):
        return "reference" if backend == "reference" else "tiled"
    reason = _obstacle(scores_of, ranker)
    if reason and backend == "triton":
        raise RuntimeError(f"{caller}: backend='triton' cannot run here: {reason}; use backend='auto' or 'tiled'")
    return "tiled" if reason else "triton"


def _obstacle(scores_of: Tensor, ranker: Ranker) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not scores_of.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {scores_of.device} and TRITON_INTERPRET=1 is not set"
    if scores_of.dtype != torch.float32:
        return f"the kernels compute in float32, and the embeddings are {scores_of.dtype}"
    from rankgrad.ops.fused.door import supports

    return None if supports(ranker) else f"there is no kernel for {ranker}"


def resolve_precision(precision: Precision, embeddings: Tensor) -> Literal["fast", "high"]:
    """Precision of the kernels for embeddings as the caller gave them."""
    if precision != "auto":
        return precision
    half = embeddings.dtype in (torch.float16, torch.bfloat16)
    return "fast" if half or torch.is_autocast_enabled(embeddings.device.type) else "high"
