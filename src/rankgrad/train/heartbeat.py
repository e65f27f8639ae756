"""Heartbeats between the processes of a run: one that has stopped responding is named, and after a time limit the run ends.

A process that has ended breaks its connections, which the others notice at once. One that was stopped, or hangs in a driver,
does not: the others would wait for it in silence. So a thread of every process counts in the store that torchrun provides,
and looks at the counts of the others.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# seconds between heartbeats, and of silence until it is reported, unless the limit is short
INTERVAL, REPORT_AFTER = 5.0, 60.0
# seconds that processes have to end by themselves once a silent one has been killed
TIME_TO_END = 15.0
# exit status of a process that ends because of another one
LOST = 3


class Heartbeat:
    """The heartbeat of one process.

    Args:
        store: shared by all processes.
        rank: of this process.
        size: number of processes.
        limit: seconds of silence after which a process is given up.
        now: the time.
    """

    def __init__(self, store: Any, rank: int, size: int, *, limit: float, now: float) -> None:
        self.store, self.rank, self.size, self.limit = store, rank, size, limit
        self.report_after = min(REPORT_AFTER, limit / 2)
        self.interval = min(INTERVAL, limit / 6)
        self.count = 0
        self.last = now
        self.seen = {other: (b"", now) for other in range(size) if other != rank}
        self.reported: set[int] = set()

    def beat(self, now: float) -> list[int]:
        """Counts, looks at the others, reports; returns the ranks that have been silent for longer than the limit."""
        self.count += 1
        self.store.set(self._key(self.rank), f"{self.count} {os.getpid()} {socket.gethostname()}")
        # this process was stopped itself: the others had no chance
        slept = now - self.last > 3 * self.interval
        self.last = now
        for other, (value, since) in self.seen.items():
            found = self.store.get(self._key(other)) if self.store.check([self._key(other)]) else b""
            self.seen[other] = (found, now if slept or found != value else since)
        silent = {other: now - since for other, (_, since) in self.seen.items()}
        for other, seconds in silent.items():
            if seconds >= self.report_after and other not in self.reported:
                self.reported.add(other)
                self._say(
                    silent,
                    f"rank {other} has not responded for {seconds:.0f} s; the run ends after {self.limit:.0f} s of silence",
                )
            elif seconds < self.report_after and other in self.reported:
                self.reported.discard(other)
                self._say(silent, f"rank {other} responds again")
        return [other for other, seconds in silent.items() if seconds >= self.limit]

    def give_up(self, ranks: list[int]) -> None:
        """Kills silent processes of this machine, so that the others get an error instead of waiting."""
        for other in ranks:
            _, pid, host = self.seen[other][0].decode().split(" ", 2) if self.seen[other][0] else ("", "0", "")
            self._say(dict.fromkeys(ranks, self.limit), f"rank {other} has not responded for {self.limit:.0f} s and is ended")
            if int(pid) and host == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)

    def _say(self, silent: dict[int, float], text: str) -> None:
        """Prints, on the first process that responds."""
        speakers = [rank for rank in range(self.size) if silent.get(rank, 0.0) < self.report_after]
        if self.rank == min(speakers, default=self.rank):
            print(f"rankgrad: {text}", file=sys.stderr, flush=True)

    @staticmethod
    def _key(rank: int) -> str:
        return f"rankgrad/heartbeat/{rank}"


@contextlib.contextmanager
def heartbeats(rank: int, size: int, *, limit: float) -> Iterator[None]:
    """Sends heartbeats inside the context, and ends this process when another one has been silent for `limit` seconds."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (there is no public way to it)
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        store = store.clone()  # a connection of its own: another thread may be waiting on that one
    own, ended = Heartbeat(store, rank, size, limit=limit, now=time.monotonic()), threading.Event()

    def run() -> None:
        while not ended.wait(own.interval):
            try:
                silent = own.beat(time.monotonic())
            except (RuntimeError, ValueError):  # the store has ended with the launcher
                return
            if silent:
                own.give_up(silent)
                if not ended.wait(TIME_TO_END):
                    os._exit(LOST)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)
