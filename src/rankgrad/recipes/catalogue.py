"""All recipes by name, and the tasks of saved runs."""

from collections.abc import Mapping
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

COMMAND_OF: Mapping[type[Recipe], str] = {RetrievalRecipe: "rankgrad", DetectionRecipe: "rankgrad detect"}
"""The command whose verbs take a kind of recipe."""


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
    if name == "retrieval":
        from rankgrad.runs.retrieval_task import RetrievalTask

        return RetrievalTask.from_run(run, context, changes)
    if name == "detection":
        from rankgrad.detection.detection_task import DetectionTask

        return DetectionTask.from_run(run, context, changes)
    raise ValueError(f"{run.recipe_file} is of the task {name!r}, which this version does not have")
