"""What a case of the fuzz is, how one is judged, and what an error must be to count as clear."""

import contextlib
import faulthandler
import io
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from rankgrad.cli import main as rankgrad
from rankgrad.train.errors import TrainingError

# a sentence and ten examples; a page that nobody reads is not clear
LONGEST_MESSAGE = 6000


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        what: what is wrong with it.
        call: hands it to the library.
        names: an error must hold one of these: the file, its folder, the flag.
        refused: whether it must be an error; else it may also be read as if nothing were.
        seconds: in which the answer must come.
    """

    what: str
    call: Callable[[], object]
    names: Sequence[str]
    refused: bool = False
    seconds: float = 20.0


class Kind(Protocol):
    """Makes cases of one kind in a new folder each."""

    name: str

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case: ...


class RefusedByCommandError(ValueError):
    """The command line's sentence on standard error, with status 2."""


class TimeIsUpError(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


def command(*arguments: str) -> str:
    """What `rankgrad` prints; its refusal is raised."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = rankgrad(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    if status == 2:
        raise RefusedByCommandError(err.getvalue())
    if status:
        raise RuntimeError(f"rankgrad {' '.join(arguments)} ended with status {status}: {err.getvalue()}")
    return out.getvalue()


@dataclass(frozen=True)
class Verdict:
    """How a case ended; `fault` says what is wrong with that."""

    outcome: str
    fault: str | None = None
    message: str = ""


def judge(case: Case, canary: Path) -> Verdict:
    """Run a case."""
    try:
        with _limited(case.seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call()
    except TimeIsUpError:
        verdict = Verdict("hang", f"still at work after {case.seconds:.0f} s")
    except (ValueError, OSError, TrainingError) as error:
        message = str(error)
        fault = complaint_about(error, case.names)
        verdict = Verdict("clear error" if fault is None else "unclear error", fault, message)
    except Exception as error:  # noqa: BLE001 (whatever comes here is what is looked for)
        verdict = Verdict("crash", f"{type(error).__name__} came through", str(error))
    else:
        verdict = Verdict("accepted", "it was accepted and must be refused") if case.refused else Verdict("handled")
    if canary.exists():
        canary.unlink()
        return Verdict("code executed", "a program in the file was run", verdict.message)
    return verdict


def complaint_about(error: Exception, names: Sequence[str]) -> str | None:
    """Why an error is not clear; None when it is."""
    message = str(error)
    if not any(name in message for name in names):
        return f"{type(error).__name__} names none of {', '.join(names)}"
    if len(message) > LONGEST_MESSAGE:
        return f"{type(error).__name__} of {len(message):,} characters"
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in message):
        return f"{type(error).__name__} with control characters in it"
    if "Traceback" in message:
        return f"{type(error).__name__} with a traceback in it"
    return None


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # what hangs outside Python hears no signal
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
