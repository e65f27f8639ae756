"""All recipes by name, and the tasks that run them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar, overload

from rankgrad._messages import did_you_mean
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.recipes import fastap, rambo, recall_at_k, smooth_ap, starters
from rankgrad.runs.recipe import Recipe
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext, Task

R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class TaskKind:
    """A task as commands know it before they import it.

    Attributes:
        recipe: what its runs are made from.
        command: the command whose subcommands take its recipes.
        factory: module and class of the task.
        data: what --data is.
        default: name of the recipe to use where none is given.
        distributed: whether several processes can train together.
        workers: how many threads decode images by default, for the help.
    """

    recipe: type[Recipe]
    command: str
    factory: str
    data: str
    default: str = ""
    distributed: bool = False
    workers: str = "one per core"

    def make(self, recipe: Recipe, context: RunContext) -> Task:
        """The task of a recipe."""
        task: Task = self._class()(recipe, context)
        return task

    def open(self, run: RunFolder, context: RunContext, changes: Mapping[str, Any]) -> Task:
        """The task of a saved run."""
        task: Task = self._class().from_run(run, context, changes)
        return task

    def _class(self) -> Any:
        module, _, name = self.factory.partition(":")
        return getattr(import_module(module), name)


TASKS: Mapping[str, TaskKind] = {
    "retrieval": TaskKind(
        RetrievalRecipe,
        "rankgrad",
        "rankgrad.runs.retrieval_task:RetrievalTask",
        data="your images: a folder, or a CSV file that lists them; your texts: a .csv, .jsonl or .parquet file; or a folder "
        "of `datasets.save_to_disk` with either",
        default="own-images",
        distributed=True,
    ),
    "detection": TaskKind(
        DetectionRecipe,
        "rankgrad detect",
        "rankgrad.detection.detection_task:DetectionTask",
        data="VOCdevkit, or a folder in its layout",
        workers="2",
    ),
}
COMMAND_OF: Mapping[type[Recipe], str] = {kind.recipe: kind.command for kind in TASKS.values()}


def _by_name() -> dict[str, Recipe]:
    rows = [row for paper in (fastap, rambo, recall_at_k, smooth_ap, starters) for row in paper.recipes()]
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "two recipes share a name"
    return found


RECIPES: Mapping[str, Recipe] = _by_name()


def recipes_of(kind: type[R]) -> Mapping[str, R]:
    """The recipes of one kind, by name."""
    return {name: recipe for name, recipe in RECIPES.items() if isinstance(recipe, kind)}


@overload
def find(name: str) -> RetrievalRecipe: ...
@overload
def find(name: str, kind: type[R]) -> R: ...
def find(name: str, kind: type[Recipe] = RetrievalRecipe) -> Recipe:
    """The recipe of that name and kind, or an error that suggests one."""
    recipe = RECIPES.get(name)
    if isinstance(recipe, kind):
        return recipe
    command = COMMAND_OF[kind]
    if recipe is not None:
        raise ValueError(
            f"{name} is a recipe of `{COMMAND_OF[type(recipe)]}`: `{command} recipes` lists those for this command"
        )
    hint = did_you_mean(name, recipes_of(kind), otherwise=f"`{command} recipes` lists all")
    raise ValueError(f"there is no recipe {name!r}: {hint}")


def task_of(run: RunFolder, context: RunContext, changes: Mapping[str, Any] = MappingProxyType({})) -> Task:
    """The task of a saved run, which imports only what it needs.

    Args:
        run: the folder.
        context: where to compute; without data it gets the run's own.
        changes: of the run's settings.
    """
    name = run.read().task
    if name not in TASKS:
        raise ValueError(f"{run.recipe_file} is of the task {name!r}, which this version does not have")
    return TASKS[name].open(run, context, changes)
