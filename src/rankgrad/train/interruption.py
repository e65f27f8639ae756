"""A polite end: the first SIGINT or SIGTERM asks the run to stop after its step, the second one ends it at once."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Listens for signals inside its context; only the main thread can.

    Args:
        grace: seconds in which further signals are the same wish as the first.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.signal: str | None = None
        self.grace = grace
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number).name, time.monotonic()
            if not self.grace:
                self._give_back()
        elif time.monotonic() - self._since > self.grace:
            self._give_back()
            signal.raise_signal(number)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
