"""Which backend and which precision compute a loss; decided here and nowhere else.

An explicit request is honoured or refused, never replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rankgrad._device import triton_obstacle
from rankgrad._gpu import has_gpu
from rankgrad.ops.loss_config import Backend, ScorePrecision
from rankgrad.ops.rankers import Ranker

if TYPE_CHECKING:
    from rankgrad.ops.triton.lowering import Lowering


def resolve(
    backend: Backend, like: Tensor, ranker: Ranker, *, caller: str, given: tuple[int, int] | None = None
) -> Literal["triton", "tiled", "reference"]:
    """The backend for embeddings like `like`, or for scores like it, `given` as (lists, length).

    On a CPU the kernels run only on request, in Triton's interpreter.
    """
    if backend in ("tiled", "reference") or (backend == "auto" and not has_gpu(like.device)):
        return "reference" if backend == "reference" else "tiled"
    reason = _obstacle(like, ranker, given is not None)
    if reason and backend == "triton":
        raise RuntimeError(f"{caller}: backend='triton' cannot run here: {reason}; use backend='auto' or 'tiled'")
    if reason is None and given is not None and backend == "auto":
        from rankgrad.ops.triton.scores import pays_off

        return "triton" if pays_off(*given) else "tiled"
    return "tiled" if reason else "triton"


def _obstacle(like: Tensor, ranker: Ranker, given_scores: bool) -> str | None:
    reason = triton_obstacle(like.device)
    if reason is not None:
        return reason
    if given_scores and like.dtype == torch.float64:
        return "the kernels compute in float32, and the scores are torch.float64"
    if not given_scores and like.dtype != torch.float32:
        return f"the kernels compute in float32, and the embeddings are {like.dtype}"
    from rankgrad.ops.triton.lowerings import lowering_of

    where = " on given scores" if given_scores else ""
    return None if lowering_of(ranker, given_scores=given_scores) else f"there is no kernel for {ranker}{where}"


def lowering_for(ranker: Ranker, *, given_scores: bool) -> "Lowering[Any]":
    """What the kernels of a ranker need, once "triton" is the backend."""
    from rankgrad.ops.triton.lowerings import lowering_of

    lowering = lowering_of(ranker, given_scores=given_scores)
    assert lowering is not None, "the backend was resolved"
    return lowering


_narrow: ContextVar[bool] = ContextVar("rankgrad_narrow", default=False)


@contextmanager
def as_if_narrow(narrow: bool) -> Iterator[None]:
    """Embeddings get the precision of 16-bit ones, which they were before they were widened."""
    token = _narrow.set(narrow)
    try:
        yield
    finally:
        _narrow.reset(token)


def resolve_precision(precision: ScorePrecision, embeddings: Tensor) -> Literal["fast", "high"]:
    """Precision of the kernels for embeddings as the caller gave them."""
    if precision != "auto":
        return precision
    half = embeddings.dtype in (torch.float16, torch.bfloat16) or _narrow.get()
    return "fast" if half or torch.is_autocast_enabled(embeddings.device.type) else "high"
