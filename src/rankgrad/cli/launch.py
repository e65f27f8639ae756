"""Many processes from one command: torchrun with the same command line, and one sentence when it fails."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from rankgrad._checks import check_count
from rankgrad.train.errors import FailedProcessError
from rankgrad.train.processes import is_lost_process, launched

# exit status of a process that stopped because another one had: it is not the one to name
LOST = 3
# exit status of a process that has told the user what to do, and of one that was asked to stop
TOLD, INTERRUPTED = 2, 130
# seconds that the first process has to say what is wrong before another one ends
HEAD_START = 2.0
# the process id of the launcher, set for processes for which it will say who has ended
LAUNCHER = "RANKGRAD_LAUNCHER"
# seconds between two looks whether it still lives
LOOK = 1.0


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `rankgrad ARGUMENTS` in so many processes of this machine under torchrun, which restarts nothing.

    Returns:
        The exit status: 0, that of a process which has told the user why it ended, or 128 and the signal that ended all.

    Raises:
        FailedProcessError: a process ended otherwise; says which and how.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    check_count(processes, name="--processes", caller="rankgrad")
    # the cores of the machine, which torchrun would leave idle but for one each
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[LAUNCHER] = str(os.getpid())
    # what it says of a failure is said below
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    command = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=0", "-m", "rankgrad.cli", *arguments]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: (_guilt(item[1].exitcode), item[1].timestamp, item[0]))
        first = error.failures.get(0)
        if first is not None and first.exitcode in (TOLD, INTERRUPTED) and _guilt(failure.exitcode) > 0:
            return int(first.exitcode)  # it has said why
        raise FailedProcessError(_ending(rank, processes, failure.exitcode, _sentence(failure.message))) from None
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def stop_with_launcher() -> None:
    """Asks this process to stop, as SIGTERM does, when its launcher was killed: the run would go on with nobody to end it."""
    launcher = int(os.environ.get(LAUNCHER, "0"))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    if launcher:
        threading.Thread(target=watch, daemon=True).start()


def _guilt(status: int) -> int:
    """Who is named first: what was ended from outside, then what failed, and last what ended because another had."""
    if status in (LOST, -signal.SIGTERM):
        return 2
    return 0 if status < 0 else 1


def _ending(rank: int, processes: int, status: int, message: str) -> str:
    who = f"rank {rank} of {processes} processes"
    if status < 0:
        return f"{who} was ended by {signal.Signals(-status).name}"
    if status == TOLD:
        return f"{who} stopped: {message}"
    return f"{who} ended with status {status}"


def _sentence(message: object) -> str:
    """What `tell` has recorded, without the name of the exception."""
    text = str(message["message"] if isinstance(message, dict) else message)
    return " ".join((text.partition("Error: ")[2] or text).split())


def without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """A command line less `--flag VALUE` and `--flag=VALUE`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        skip = not skip and argument == flag
    return kept


def tell(who: str, error: BaseException) -> int:
    """Says why a process ends: the first on standard error, every one in the record that torchrun reads; the exit status."""
    lost = launched() and is_lost_process(error)
    told_by_launcher = lost and LAUNCHER in os.environ
    if os.environ.get("RANK", "0") == "0" and not told_by_launcher:
        print(f"{who}: {error}", file=sys.stderr)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
        if os.environ.get("RANK", "0") != "0" and not lost:
            # a mistake is most often everybody's: torchrun ends the first process as soon as this one is gone
            time.sleep(HEAD_START)
    return LOST if lost else TOLD
