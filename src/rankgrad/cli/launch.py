"""Several processes from one command: torchrun with the same command line, and one sentence when it fails."""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankgrad._checks import check_count
from rankgrad.train.errors import FailedProcessError
from rankgrad.train.heartbeat import LOST
from rankgrad.train.processes import is_lost_process, launched

# exit status of a process that has reported an error, and of one that was asked to stop
REPORTED, INTERRUPTED = 2, 130
# seconds that the first process has to report an error before another one ends
HEAD_START = 2.0
# process id of the launcher, set for its processes: it reports which of them has ended
LAUNCHER = "RANKGRAD_LAUNCHER"
# seconds between two checks that the launcher is alive
LAUNCHER_CHECK = 1.0
# seconds between two searches for stopped processes while a launch is ending
CHILD_CHECK = 0.5


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `rankgrad ARGUMENTS` in several processes on this machine under torchrun, without restarts.

    Returns:
        The exit status: 0, that of a process which has reported why it ended, or 128 plus the signal that ended all.

    Raises:
        FailedProcessError: a process ended otherwise; the message says which and how.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    check_count(processes, name="--processes", caller="rankgrad")
    # torchrun would give each process one core
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[LAUNCHER] = str(os.getpid())
    command = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=0", "-m", "rankgrad.cli", *arguments]
    try:
        # torchrun would make a folder for its records and leave it
        with tempfile.TemporaryDirectory(prefix="rankgrad-launch-") as records, _no_logging(), _end_stopped_children():
            run(parse_args([f"--log-dir={records}", *command]))
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: (_blame(item[1].exitcode), item[1].timestamp, item[0]))
        first = error.failures.get(0)
        if first is not None and first.exitcode in (REPORTED, INTERRUPTED) and _blame(failure.exitcode) > 0:
            return int(first.exitcode)
        raise FailedProcessError(_ending(rank, processes, failure.exitcode, _sentence(failure.message))) from None
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    """Silences torchrun: failures are reported by `launch`."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _end_stopped_children() -> Iterator[None]:
    """Kills stopped child processes when this process is asked to end: they do not react to the signals that torchrun sends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while (received := ours.recv(1)) and received[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        while received:
            for child in _children(state="T"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(CHILD_CHECK)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()


def _children(state: str) -> list[int]:
    """Process ids of child processes in a state, where there is /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] == state and int(fields[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


def stop_with_launcher() -> None:
    """Sends SIGTERM to this process when its launcher has been killed, since nothing else would end the run."""
    launcher = int(os.environ.get(LAUNCHER, "0"))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_CHECK)
        os.kill(os.getpid(), signal.SIGTERM)

    if launcher:
        threading.Thread(target=watch, daemon=True).start()


def _blame(status: int) -> int:
    """Rank in the order of blame: killed from outside, failed, ended because another process had."""
    if status in (LOST, -signal.SIGTERM):
        return 2
    return 0 if status < 0 else 1


def _ending(rank: int, processes: int, status: int, message: str) -> str:
    who = f"rank {rank} of {processes} processes"
    if status < 0:
        return f"{who} was ended by {signal.Signals(-status).name}"
    if status == REPORTED:
        return f"{who} stopped: {message}"
    return f"{who} ended with status {status}"


def _sentence(message: object) -> str:
    """The message that `report_error` has recorded, without the name of the exception."""
    text = str(message["message"] if isinstance(message, dict) else message)
    return " ".join((text.partition("Error: ")[2] or text).split())


def without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """A command line without `--flag VALUE` and `--flag=VALUE`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        skip = not skip and argument == flag
    return kept


def report_error(command: str, error: BaseException) -> int:
    """Reports why this process ends and returns its exit status.

    The first process prints to standard error; every process writes the record that torchrun reads.
    """
    lost = launched() and is_lost_process(error)
    reported_by_launcher = lost and LAUNCHER in os.environ
    if os.environ.get("RANK", "0") == "0" and not reported_by_launcher:
        print(f"{command}: {error}", file=sys.stderr)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
        if os.environ.get("RANK", "0") != "0" and not lost:
            # most often all processes have the same error, and torchrun ends the first one as soon as this one has ended
            time.sleep(HEAD_START)
    return LOST if lost else REPORTED
