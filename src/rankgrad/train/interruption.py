"""A polite end: the first SIGINT or SIGTERM asks the run to stop after its step, the second one ends it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Listens for signals inside its context; only the main thread can."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
