"""How a run ends before its time."""

import errno


class TrainingError(RuntimeError):
    """A run cannot go on; the message is one sentence for whoever started it."""


class LostProcessError(TrainingError):
    """Another process of the run is gone."""


def is_full(error: OSError) -> bool:
    """Whether there was no room, on the disk, in the quota or below the largest file allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason_of(error: OSError) -> str:
    """Why a file could not be written, in a few words."""
    return "the disk or quota is full" if is_full(error) else (error.strerror or str(error))
