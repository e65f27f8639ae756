"""How a worker process behaves: it ends when its parent does, and not before."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import TracebackType

# seconds between a worker's checks that its parent process is alive
PARENT_CHECK = 0.5


def init_worker(_: int = 0) -> None:
    """Let a worker end when its parent does, and not before.

    A terminal and torchrun send their signals to workers too, and a parent that stops after its step still needs them. A worker
    that is starting while its parent is killed would not notice for seconds, or ever; meanwhile it keeps the parent's
    connections open, so that the other processes of a job wait for the dead one. A thread of multiprocessing would print how
    it noticed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"
    assert parent.pid is not None, "the parent process has started"
    threading.Thread(target=_exit_after, args=(parent.pid,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    default_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (ConnectionError, EOFError)):
            default_hook(kind, error, trace)

    sys.excepthook = hook


def _exit_after(process: int) -> None:
    """End this process once the one that needs it has ended."""
    # a killed process keeps its number until its own parent takes note, but its children have another parent at once. Those
    # that a fork server started for it have never been its children
    is_child = os.getppid() == process
    with contextlib.suppress(ProcessLookupError):
        while not is_child or os.getppid() == process:
            os.kill(process, 0)
            time.sleep(PARENT_CHECK)
    os._exit(1)
