"""The processes of a job, found from outside: tests and trials kill one and look for what is left."""

import contextlib
import os
import signal
from pathlib import Path


def alive(mark: Path) -> set[int]:
    """Ids of the processes that have `mark` in their command line or environment, as all have that such a process starts."""
    found = (folder for folder in Path("/proc").glob("[0-9]*") if str(mark).encode() in _told(folder))
    return {int(folder.name) for folder in found}


def ranks(mark: Path) -> dict[int, int]:
    """Process ids by rank. What a rank has started was told the same, and later."""
    told = {number: _told(Path("/proc", str(number))).split(b"\0") for number in sorted(alive(mark), reverse=True)}
    return {int(entry[5:]): number for number, entries in told.items() for entry in entries if entry.startswith(b"RANK=")}


def killed(number: int) -> bool:
    """Ends a process at once; False if it had ended, which nobody may have taken notice of yet."""
    with contextlib.suppress(ProcessLookupError):
        if _told(Path("/proc", str(number))):
            os.kill(number, signal.SIGKILL)
            return True
    return False


def _told(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
