"""The rows of `python -m benchmarks.kernels`: which losses at which sizes, what they have to reach, and their data."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.baselines import dense_baseline
from benchmarks.synthetic import hard_batch, ragged_batch

Kind = Literal["", "ragged", "unit", "gallery", "vector"]

COUNTED = ("recall_at_k", "smooth_ap", "rambo_recall", "rambo_ap")  # these compare every score with relevant items
LOSSES = (*COUNTED, "fast_ap")
ONE_PER_RANKER = ("recall_at_k", "rambo_ap", "fast_ap")
PRECISIONS = ("fast", "high")
GALLERY_RELEVANT = 4


@dataclass(frozen=True)
class Target:
    """Milliseconds and megabytes that are not to be exceeded."""

    ms: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms, {self.megabytes:.4g} MB"

    def verdict(self, ms: float, megabytes: float) -> str:
        over = {"time": (ms, self.ms), "memory": (megabytes, self.megabytes)}
        # what is to be undercut may have been too small to be seen
        missed = [f"{name} {value / max(most, 1e-9):.2f}x" for name, (value, most) in over.items() if value > most]
        return f"missed: {', '.join(missed)}" if missed else "met"


TARGETS = {
    "fast": {
        (4096, "3"): Target(1, 64),
        (16384, "3"): Target(2.5, 256),
        (65536, "3"): Target(30, 1000),
        (65530, "9"): Target(60, 1000),
        (16400, "99"): Target(15, 1000),
        (262144, "3"): Target(430, 4000),
        (1048576, "3"): Target(7000, 16_000),
    },
    "high": {
        (4096, "3"): Target(0.9, 64),
        (16384, "3"): Target(4.5, 280),
        (65536, "3"): Target(60, 1100),
        (16400, "99"): Target(15, 1000),
    },
}
"""By precision, batch and relevant items of a query, for one H200 and 512 dimensions."""
FAST_AP_TARGETS: dict[str, dict[tuple[int, str], Target]] = {
    "fast": {(65536, "3"): Target(40, 1000), (262144, "3"): Target(600, 4000), (1048576, "3"): Target(10_000, 16_000)},
}
RAGGED_TARGETS = {
    **{(loss, 16384): Target(40, 1000) for loss in ("recall_at_k", "rambo_ap")},
    **{(loss, 65536): Target(500, 4000) for loss in ("recall_at_k", "rambo_ap")},
    ("fast_ap", 16384): Target(10, 1000),
}
"""By loss and batch, for 0 to 499 relevant items."""
VECTOR_SPEED_UP = {(10**8, "1%"): 4.0, (10**8, "10%"): 2.25}
"""How many times faster than two sorts a list has to be; where nothing is said, as fast. A quarter of their memory."""


@dataclass(frozen=True)
class Shape:
    """The batch of a row: queries, candidates if they are others, relevant items of a query, dimensions."""

    queries: int
    relevant: str = "3"
    dim: int = 512
    kind: Kind = ""
    candidates: int = 0

    @property
    def text(self) -> str:
        return f"{self.queries}x{self.candidates}" if self.candidates else str(self.queries)

    @property
    def pairs(self) -> int:
        return self.queries * (self.candidates or self.queries)

    @property
    def per_class(self) -> int:
        """Items of a class, in a ragged batch of the largest."""
        return int(self.relevant.rpartition("-")[2]) + 1


@dataclass(frozen=True)
class Case:
    """One row: `what` is ours, a baseline or the floor."""

    loss: str
    what: str
    shape: Shape
    precision: str

    @property
    def row(self) -> str:
        return "/".join(part for part in (self.loss, self.what, self.shape.kind) if part)

    @property
    def key(self) -> str:
        """What --only is matched with."""
        shape = self.shape
        return f"{self.row} N={shape.text} relevant={shape.relevant} d={shape.dim} {self.precision}"

    @property
    def target(self) -> Target | None:
        shape = self.shape
        if self.what != "ours" or shape.kind not in ("", "ragged") or shape.dim != 512:
            return None
        if shape.kind == "ragged":
            return RAGGED_TARGETS.get((self.loss, shape.queries))
        targets = FAST_AP_TARGETS if self.loss == "fast_ap" else TARGETS
        return targets.get(self.precision, {}).get((shape.queries, shape.relevant))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run: those of the table, or small ones that try the command itself."""

    balanced: tuple[int, ...] = (4096, 16384, 65536)
    many: tuple[tuple[int, str], ...] = ((65530, "9"), (16400, "99"))  # more relevant items
    large: int = 262144
    huge: int = 1048576
    ragged: tuple[int, ...] = (16384, 65536)
    most: int = 500  # items of a class in ragged batches
    middle: int = 16384  # where dimensions are varied
    dims: tuple[int, ...] = (64, 128, 384, 768, 2048)
    gallery: tuple[int, int] = (16384, 65536)
    vectors: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)
    to_the_end: tuple[int, ...] = (8192, 32768, 49152)  # where only the dense formulation is measured, to find its end
    check: int = 2048
    dim: int = 512


TINY = Sizes(
    balanced=(32,),
    many=((40, "9"),),
    large=48,
    huge=64,
    ragged=(48,),
    most=6,
    middle=32,
    dims=(8,),
    gallery=(8, 32),
    vectors=(500,),
    to_the_end=(),
    check=64,
    dim=16,
)


def vector_target(shape: Shape, ms: float, megabytes: float) -> Target:
    """What a single list has to reach, given the time and the memory of two sorts."""
    return Target(ms / VECTOR_SPEED_UP.get((shape.queries, shape.relevant), 1.0), megabytes / 4)


def all_cases(sizes: Sizes, *, huge: bool) -> Iterator[Case]:
    """Every row, shape by shape: the floor, ours, then the others."""
    for count in sizes.balanced:
        shape = Shape(count, dim=sizes.dim)
        yield floor(shape)
        yield from ours(LOSSES, shape)
        yield from (dense(loss, shape) for loss in LOSSES)
        is_largest = count == max(sizes.balanced)
        yield from (chunked(loss, shape) for loss in (LOSSES if is_largest else ("recall_at_k",)))
    for count, relevant in sizes.many:
        shape = Shape(count, relevant, sizes.dim)
        yield floor(shape)
        yield from ours(COUNTED, shape)
        yield dense("recall_at_k", shape)
        yield chunked("recall_at_k", shape)
    large = Shape(sizes.large, dim=sizes.dim)
    yield floor(large)
    yield from ours(LOSSES, large)
    yield chunked("recall_at_k", large)
    for count, share in itertools.product(sizes.vectors, ("1%", "10%")):
        vector = Shape(count, share, dim=1, kind="vector")
        yield from (Case("rambo_ap", what, vector, "float32") for what in ("six-argsorts", "two-sorts", "ours"))
    for dim in sizes.dims:
        shape = Shape(sizes.middle, dim=dim)
        yield floor(shape)
        yield from ours(("recall_at_k",), shape)
    for count in (sizes.middle, max(sizes.balanced)):
        yield from ours(("recall_at_k",), Shape(count, dim=sizes.dim, kind="unit"))
    gallery = Shape(sizes.gallery[0], str(GALLERY_RELEVANT), sizes.dim, "gallery", sizes.gallery[1])
    yield floor(gallery)
    yield from ours(ONE_PER_RANKER, gallery)
    for count in sizes.ragged:
        yield from ours(ONE_PER_RANKER, Shape(count, f"0-{sizes.most - 1}", sizes.dim, "ragged"))
    for count in sizes.to_the_end:
        yield dense("recall_at_k", Shape(count, dim=sizes.dim))
    if huge:
        shape = Shape(sizes.huge, dim=sizes.dim)
        yield floor(shape)
        yield from ours(LOSSES, shape)


def quick_cases(sizes: Sizes) -> Iterator[Case]:
    """A few of them."""
    for count in sizes.balanced[:2]:
        shape = Shape(count, dim=sizes.dim)
        yield floor(shape)
        yield from ours(ONE_PER_RANKER, shape)
        yield dense("recall_at_k", shape)
    yield chunked("recall_at_k", Shape(sizes.middle, dim=sizes.dim))
    vector = Shape(sizes.vectors[:2][-1], "1%", dim=1, kind="vector")
    yield from (Case("rambo_ap", what, vector, "float32") for what in ("two-sorts", "ours"))


def floor(shape: Shape) -> Case:
    """The matrix products alone."""
    return Case("products", "floor", shape, "float16")


def ours(losses: Iterable[str], shape: Shape) -> Iterator[Case]:
    """These losses, each in both precisions."""
    return (Case(loss, "ours", shape, precision) for loss in losses for precision in PRECISIONS)


def dense(loss: str, shape: Shape) -> Case:
    """The best formulation that stores all scores."""
    return Case(loss, dense_baseline(loss).name, shape, "float32")


def chunked(loss: str, shape: Shape) -> Case:
    """The best formulation by row chunks."""
    return Case(loss, "chunked", shape, "float16")


@dataclass(frozen=True)
class Batch:
    """Inputs of a row: leaves that want a gradient, and the labels of each (or the relevance of a vector)."""

    leaves: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    @property
    def gradient_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """As a loss takes them: embeddings and labels, then those of the references."""
        return tuple(itertools.chain.from_iterable(zip(self.leaves, self.labels, strict=True)))


def make_batch(shape: Shape, device: torch.device, label_device: torch.device) -> Batch:
    """The data of a shape; the same numbers on every device, but for vectors."""
    if shape.kind == "vector":
        generator = torch.Generator(device).manual_seed(0)
        share = float(shape.relevant.removesuffix("%")) / 100
        relevance = torch.rand(shape.queries, generator=generator, device=device) < share
        scores = torch.randn(shape.queries, generator=generator, device=device) + relevance
        return Batch((scores.requires_grad_(),), (relevance,))
    if shape.kind == "ragged":
        embeddings, labels = ragged_batch(shape.queries, shape.dim, shape.per_class, device=device)
    elif shape.kind == "gallery":
        return _gallery_batch(shape, device, label_device)
    else:
        embeddings, labels = hard_batch(shape.queries, shape.dim, shape.per_class, device=device)
    if shape.kind == "unit":
        embeddings = normalize(embeddings)
    return Batch((embeddings.requires_grad_(),), (labels.to(label_device),))


def _gallery_batch(shape: Shape, device: torch.device, label_device: torch.device) -> Batch:
    """One item of every class is a query, the others are the gallery."""
    embeddings, labels = hard_batch(shape.queries * shape.per_class, shape.dim, shape.per_class)
    members = labels.argsort(stable=True).view(-1, shape.per_class)
    queries, gallery = members[:, 0], members[:, 1:].flatten().sort().values
    leaves = tuple(embeddings[part].to(device).requires_grad_() for part in (queries, gallery))
    return Batch(leaves, tuple(labels[part].to(label_device) for part in (queries, gallery)))
