"""Errors of training. Each message is one sentence for the user who started the run."""

import re

import torch

from rankgrad._messages import format_bytes


class TrainingError(RuntimeError):
    """The run cannot continue."""


class LostProcessError(TrainingError):
    """Another process of the run has ended."""


class FailedProcessError(TrainingError):
    """A launched process ended before the run was finished."""


class OutOfMemoryError(RuntimeError):
    """A batch does not fit in memory, whatever the chunk size."""


class NotFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite.

    Attributes:
        fact: what was found and at which step.
        images: the batch it happened on; empty where no single batch is to blame.
    """

    def __init__(self, fact: str, images: str = "") -> None:
        super().__init__(f"{fact}; the batch was images {images}" if images else fact)
        self.fact, self.images = fact, images


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU, where torch raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_killed_worker(error: BaseException) -> bool:
    """Whether a process of a `DataLoader` has ended before its work was done, for which torch raises a plain RuntimeError."""
    return isinstance(error, RuntimeError) and re.match(r"DataLoader worker \(pid", str(error)) is not None


def describe_killed_worker(error: BaseException) -> str:
    """One sentence about a process of a `DataLoader` that has ended, and what to do."""
    # torch goes on with advice about its own arguments
    told = re.sub(r"^DataLoader worker \(pid(\(s\))? ([^)]*)\) (is )?", r"process \2, ", str(error).strip())
    first = told.partition(". ")[0].rstrip(".")
    return f"a process that loads images has ended ({first}), most often for lack of memory: use fewer --workers"


def describe_out_of_memory(error: BaseException) -> str:
    """One sentence about lack of memory and what to do."""
    wanted = re.search(r"tried to allocate (\d+) bytes", str(error))
    what = f" ({format_bytes(int(wanted.group(1)))} more were wanted)" if wanted else ""
    return f"out of memory{what}: use a smaller --dim, --trunk, --batch-size, --chunk-size or --size"
