"""How far it is: a bar on a terminal, now and then a line elsewhere."""

import importlib
import importlib.util
import sys
import time
from types import TracebackType
from typing import Any, TextIO

# seconds between lines where there is no terminal: a log file is read later
BETWEEN_LINES = 10.0


class Progress:
    """Counts up to `total` and says so on standard error.

        with Progress(len(images), "embedding", unit="images") as progress:
            progress.advance(256)

    Where nobody watches, nothing is said before `BETWEEN_LINES` seconds have passed, so what is quick stays quiet.

    Args:
        total: what is to be done.
        name: what it is.
        unit: of what, in the plural.
        done: what had been done before.
        shown: False says nothing at all.
    """

    def __init__(
        self, total: int, name: str, *, unit: str, done: int = 0, shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self.total, self.name, self.unit, self.done, self.shown = total, name, unit, done, shown
        self._stream = stream or sys.stderr
        self._first, self._start = done, time.perf_counter()
        self._said = self._start
        self._note = ""
        self._bar: Any = None
        if shown and self._stream.isatty() and importlib.util.find_spec("tqdm") is not None:
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(total=total, initial=done, desc=name, unit=f" {unit}", file=self._stream, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; `note` is shown beside them until another one comes."""
        self.done += count
        self._note = note or self._note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return
        now = time.perf_counter()
        if self.shown and now - self._said >= BETWEEN_LINES:
            self._said = now
            self._print(self._line(now))

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._print(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, now: float) -> str:
        rate = (self.done - self._first) / max(now - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        parts = [f"{self.name}: {self.done:,} of {self.total:,} {self.unit}", self._note, f"{_clock(left)} left"]
        return ", ".join(part for part in parts if part)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
