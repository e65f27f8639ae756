"""The rows of `python -m benchmarks.training_rates`: stages, networks, and how batches are cut."""

from collections.abc import Sequence
from dataclasses import dataclass

PREPARING = ("decode", "augment")
STAGES = (*PREPARING, "bare", "step", "train", "metric-learning")
MODELS = (("resnet50", 224), ("lite0", 112))
# batches that pass the network as a whole, and (batch, images in a pass) of those in chunks
WHOLE = (128, 400)
IN_CHUNKS = ((400, 100), (4000, 400))


@dataclass(frozen=True)
class RateCase:
    """One row: a stage of a batch, how the batch is cut, and whether the network goes through `torch.compile`."""

    stage: str
    model: str
    size: int
    batch: int
    chunk: int = 0
    keep: str = "auto"
    compiled: bool = False

    @property
    def cut(self) -> str:
        cut = f"chunks of {self.chunk}, keep {self.keep}" if self.chunk else "whole"
        return f"{cut}, compiled" if self.compiled else cut

    @property
    def key(self) -> str:
        return f"{self.stage} {self.model} {self.size} {self.batch} {self.cut}"

    @property
    def images_in_pass(self) -> int:
        return self.chunk or self.batch


def all_cases(
    models: Sequence[tuple[str, int]] = MODELS,
    whole: Sequence[int] = WHOLE,
    in_chunks: Sequence[tuple[int, int]] = IN_CHUNKS,
    *,
    compiled: bool = False,
) -> list[RateCase]:
    """All rows, limits first and then what matters most; `compiled` are rows of the largest whole batch only."""
    if compiled:
        largest = [(model, size, whole[-1], 0, "auto", True) for model, size in models]
        return [RateCase(stage, *case) for case in largest for stage in ("bare", "step")]
    cuts = [(batch, 0, "auto") for batch in whole]
    repeated, kept = ([(*cut, keep) for cut in in_chunks] for keep in ("none", "auto"))
    passes = sorted({*whole, *(chunk for _, chunk in in_chunks)})
    groups: list[tuple[str, list[tuple[int, int, str]]]] = [
        ("decode", [(0, 0, "auto")]), ("augment", [(whole[-1], 0, "auto")]), ("bare", [(n, 0, "auto") for n in passes]),
        ("step", cuts), ("train", cuts), ("step", repeated), ("train", repeated), ("step", kept), ("metric-learning", cuts),
        ("train", kept),
    ]  # fmt: skip
    return [RateCase(stage, model, size, *cut) for stage, all_cuts in groups for model, size in models for cut in all_cuts]
