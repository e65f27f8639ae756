"""The folder of a run: its layout, what the run is of, and who may write to it.

RUN/recipe.json       task, recipe, settings, where the data is, class names
RUN/data.json         fingerprints of the data that the run was started on
RUN/journal.jsonl     how training went
RUN/checkpoints/      weights and the state to resume from
RUN/eval/<key>/       a result and what it was computed from; the key of the run's own tests is the name of the split
RUN/lock              held while training
RUN/eval/lock         held while evaluating, so that a run can be tested while it trains

A shared model (`rankgrad card --out`) is the folder of a run that has weights and nothing to resume from: in place of
checkpoints/ it has model.safetensors, and manifest.json with its digest.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rankgrad._files import FileLock, LockedError, remove_folder, replace_file, sweep
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.recipe import Published, Recipe
from rankgrad.runs.task import RETRIEVAL, RunContext
from rankgrad.train.checkpoints import MANIFEST, Checkpoint, CheckpointStore, Pointer, checked
from rankgrad.train.processes import ALONE, Processes

DEBUG_NOTICE = "This is a debug run: everything in it was shrunk, and its numbers mean nothing."
UNTRAINED = "untrained"
SHARED_WEIGHTS = "model.safetensors"

RecipeType = TypeVar("RecipeType", bound=Recipe)


@dataclass(frozen=True)
class RunFile:
    """The content of RUN/recipe.json.

    Attributes:
        task: name of the task.
        name: of the recipe.
        what: the recipe's description.
        settings: of the recipe, as JSON has them.
        published: numbers to compare with.
        notes: of the recipe.
        data: where the data was.
        debug: whether the run was shrunk.
        entries: what else the task saved, such as class names.
    """

    task: str
    name: str
    what: str
    settings: Mapping[str, Any]
    published: tuple[Published, ...]
    notes: tuple[str, ...]
    data: Path | None
    debug: bool
    entries: Mapping[str, Any]

    @classmethod
    def of(cls, task: str, recipe: Recipe, data: Path | None, *, debug: bool, entries: Mapping[str, Any]) -> "RunFile":
        """What to save of a run."""
        return cls(
            task, recipe.name, recipe.what, recipe.settings(), recipe.published, recipe.notes, data, debug, dict(entries)
        )  # fmt: skip

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RunFile":
        """What was saved; a file without a task is of a retrieval run."""
        known = {"task", "name", "what", "settings", "published", "notes", "data", "debug"}
        data = content.get("data")
        return cls(
            task=str(content.get("task", RETRIEVAL)),
            name=content["name"],
            what=content.get("what", ""),
            settings=dict(content["settings"]),
            published=tuple(Published(**number) for number in content.get("published", ())),
            notes=tuple(content.get("notes", ())),
            data=None if data is None else Path(data),
            debug=bool(content.get("debug")),
            entries={name: value for name, value in content.items() if name not in known},
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "task": self.task,
            "name": self.name,
            "what": self.what,
            "settings": dict(self.settings),
            "published": [asdict(number) for number in self.published],
            "notes": list(self.notes),
            "data": None if self.data is None else str(self.data),
            "debug": self.debug,
            **self.entries,
        }

    def recipe(self, kind: type[RecipeType]) -> RecipeType:
        """The recipe, checked."""
        recipe = kind(name=self.name, what=self.what, published=self.published, notes=self.notes)
        return recipe.with_settings({**kind.before_setting, **self.settings})


class RunFolder:
    """Paths of a run and its small files.

    Args:
        path: the folder; made when a run starts.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.json"

    @property
    def data_file(self) -> Path:
        return self.path / "data.json"

    @property
    def debug_file(self) -> Path:
        return self.path / "DEBUG.txt"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.path / "checkpoints")

    @property
    def is_shared(self) -> bool:
        """Whether it is a shared model, which has weights and nothing to resume from."""
        return (self.path / MANIFEST).is_file()

    @property
    def default_checkpoint(self) -> Pointer:
        """The best where there is one, else the last; that of a shared model is the one it has."""
        if self.is_shared:
            return self._shared_checkpoint()[0]
        return "best" if self.checkpoints.pointer("best") else "last"

    def checkpoint(self, which: Pointer) -> Checkpoint:
        """The weights of the run, whose files are what was written."""
        if not self.is_shared:
            return self.checkpoints.checkpoint(which)
        name, step = self._shared_checkpoint()
        if which != name:
            raise FileNotFoundError(f"{self} is a shared model: it has the {name} checkpoint of its run, not the {which} one")
        return checked(Checkpoint(self.path, step, SHARED_WEIGHTS), has_state=False)

    def _shared_checkpoint(self) -> tuple[Pointer, int]:
        with explain_unreadable(self.path / MANIFEST, "manifest"):
            content = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            return ("best" if content["checkpoint"] == "best" else "last"), int(content["step"])

    def result(self, key: str) -> Path:
        """Where the result with this key is."""
        return self.eval / key

    @property
    def is_begun(self) -> bool:
        """Whether there is a checkpoint to resume from; that of a run of 0 epochs is not."""
        pointer = self.checkpoints.pointer("last")
        return pointer is not None and pointer["step"] > 0

    def remove_untrained_checkpoint(self) -> None:
        """Make room for the training of a run that so far had 0 epochs, whose checkpoint has no state to resume from."""
        if self.checkpoints.pointer("last") is not None and not self.is_begun:
            remove_folder(self.checkpoints.path)

    def check_free(self) -> None:
        """Refuse a folder that is not empty, unless all it holds is of a run that ended before its first step."""
        if not self.path.exists() or self._is_free():
            return
        resume = f"resume the run in it with --resume {self}, or " if self.recipe_file.is_file() else ""
        raise ValueError(f"{self} already exists and is not empty: {resume}choose another folder with --out")

    def _is_free(self) -> bool:
        if not self.path.is_dir():
            return False
        before_the_first_step = {
            path.name for path in (self.recipe_file, self.data_file, self.debug_file, self.lock_file, self.eval)
        }
        store = self.path / "checkpoints"
        # temporary files of a killed process are removed by the next one
        found = {path.name for path in (*self.path.iterdir(), *store.glob("*")) if not path.name.startswith(".writing-")}
        results = {path.name for path in self.eval.glob("*") if not path.name.startswith(".writing-")} - {"lock"}
        return found <= {*before_the_first_step, store.name} and all(name.endswith(f"@{UNTRAINED}") for name in results)

    def read(self) -> RunFile:
        """What the run is of; the file may hold anything."""
        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"{self.recipe_file} is missing: {self} is not the folder of a run")
        with explain_unreadable(self.recipe_file):
            found = RunFile.from_dict(json.loads(self.recipe_file.read_text(encoding="utf-8")))
        if not self.is_shared:
            return found
        # a shared model names its own files relative to itself
        own = {name: str(self.path / value) for name, value in found.settings.items() if str(value).startswith("./")}
        return replace(found, settings={**found.settings, **own})

    def read_recipe(self, kind: type[RecipeType]) -> RecipeType:
        """The recipe of the run, or a message that names the file."""
        content = self.read()
        with explain_unreadable(self.recipe_file):
            return content.recipe(kind)

    def context(self, context: RunContext) -> RunContext:
        """The context with the data of the run, where it names none."""
        return context if context.data is not None else replace(context, data=self.read().data)

    @contextlib.contextmanager
    def recorded(self, content: RunFile, processes: Processes = ALONE) -> Iterator[None]:
        """Write recipe.json around training; settings with which the run is refused leave the file as it was."""
        before = self.recipe_file.read_bytes() if processes.first and self.recipe_file.is_file() else None
        processes.on_first(lambda: self._write(content))
        try:
            yield
        except ValueError:
            if before is not None:
                replace_file(self.recipe_file, before)
            raise

    def _write(self, content: RunFile) -> None:
        replace_file(self.recipe_file, json.dumps(content.as_dict(), indent=1) + "\n")
        if content.debug:
            replace_file(self.debug_file, f"{DEBUG_NOTICE}\n")

    def read_data_identity(self) -> Mapping[str, DataIdentity] | None:
        """What the run was started on, by split; None for a run that was saved without it."""
        if not self.data_file.is_file():
            return None
        with explain_unreadable(self.data_file, "list of fingerprints"):
            content = json.loads(self.data_file.read_text(encoding="utf-8"))
            return {str(split): DataIdentity.from_dict(found) for split, found in content.items()}

    def write_data_identity(self, identity: Mapping[str, DataIdentity]) -> None:
        """Save what the run was started on."""
        content = {split: found.as_dict() for split, found in identity.items()}
        replace_file(self.data_file, json.dumps(content, indent=1) + "\n")

    @contextlib.contextmanager
    def training(self, processes: Processes = ALONE) -> Iterator[None]:
        """Hold RUN/lock on the first process; refused while another process trains here."""
        lock = FileLock(self.lock_file, f"{self} is in use: a run is being trained in it")
        processes.on_first(lambda: _acquire(lock))
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def evaluating(self, processes: Processes = ALONE) -> Iterator[None]:
        """Hold RUN/eval/lock on the first process; a folder that cannot be written to needs none."""
        lock = FileLock(self.eval / "lock", f"{self} is in use: it is being evaluated")

        def acquire() -> None:
            try:
                _acquire(lock)
                sweep(self.eval)
            except LockedError:
                raise
            except OSError:
                pass

        processes.on_first(acquire)
        try:
            yield
        finally:
            lock.release()


def _acquire(lock: FileLock) -> None:
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    lock.acquire()


@contextlib.contextmanager
def explain_unreadable(path: Path, what: str = "recipe") -> Iterator[None]:
    """Around the use of a file of a run that may hold anything."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is not a {what} that this version can read: {error}") from error
