"""RUN/recipe.json: what a run is of, written when it starts and read by whoever continues, tests or shows it."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rankgrad.runs.recipe import Published
from rankgrad.train.checkpoints import UNFINISHED, CheckpointStore

RECIPE_FILE = "recipe.json"
DEBUG_NOTICE = "This is a debug run: everything in it was shrunk, and its numbers mean nothing."

Saved = TypeVar("Saved")


class RunFolder:
    """Paths of a run and its small files.

    Args:
        path: the folder; created when a run starts.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.path / "checkpoints")

    def prepare(self) -> None:
        """Create the folder and remove what an interrupted write left."""
        self.checkpoints.prepare()
        for leftover in self.path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def write_json(self, name: str, content: Any) -> None:
        """Replace a JSON file of the run in one move."""
        unfinished = self.path / f"{UNFINISHED}{name}"
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path / name)


class Described(Protocol):
    """A recipe of any task."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def published(self) -> tuple[Published, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def settings(self) -> dict[str, Any]: ...


def content_of(recipe: Described, data: Path | None, *, debug: bool) -> dict[str, Any]:
    """What the file says, whatever the task."""
    return {
        "name": recipe.name,
        "what": recipe.what,
        "settings": recipe.settings(),
        "published": [asdict(number) for number in recipe.published],
        "notes": list(recipe.notes),
        "data": None if data is None else str(data),
        "debug": debug,
    }


def description_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that are not settings."""
    return {
        "name": content["name"],
        "what": content.get("what", ""),
        "notes": tuple(content.get("notes", ())),
        "published": tuple(Published(**number) for number in content.get("published", ())),
    }


def data_in(content: Mapping[str, Any]) -> Path | None:
    """Where the data lay."""
    return None if content.get("data") is None else Path(content["data"])


def read(folder: Path, make: Callable[[Mapping[str, Any]], Saved]) -> Saved:
    """What `make` makes of the file's content, which may be anything."""
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder} is not the folder of a run")
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is not a recipe that this version can read: {error}") from error
