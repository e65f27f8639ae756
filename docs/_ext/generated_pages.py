"""Pages that are made from the code when the site is built: the API, the recipes, the notebook."""

import csv
import importlib
import inspect
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from torch import nn

import rankgrad as rg
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.losses.simix import PAPER_KS, PAPER_KS_WITH_SIMIX
from rankgrad.ops.rankers import Ranker
from rankgrad.recipes.catalogue import RECIPES
from rankgrad.runs.recipe import Published, Recipe, format_value

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# modules whose public names have a section, with its title; the names of `rankgrad` itself come before
SECTIONS = {
    "rankgrad.data.samplers": "Batch samplers",
    "rankgrad.data.category_samplers": "Batch samplers of categories",
    "rankgrad.models": "Models",
    "rankgrad.eval": "Evaluation, in detail",
    "rankgrad.search": "Search",
    "rankgrad.detection": "Detection",
    "rankgrad.integrations.sentence_transformers": "sentence-transformers",
    "rankgrad.integrations.pytorch_metric_learning": "pytorch-metric-learning",
    "rankgrad.integrations.lightning": "Lightning",
    "rankgrad.integrations.hugging_face": "Hugging Face",
    "rankgrad.integrations.trackers": "Experiment trackers",
}
DATA_TITLES = {
    "sop": "Stanford Online Products",
    "inshop": "In-Shop Clothes",
    "vehicleid": "VehicleID",
    "inat": "iNaturalist",
    "cub": "CUB-200",
    "cars": "Cars196",
    "gldv1": "Google Landmarks, tested on Oxford and Paris",
    "omniglot": "Omniglot",
    "glyphs": "Glyphs, built in",
    "folder": "Your own images",
    "voc": "Pascal VOC, detection",
    "shapes": "Drawn shapes, built in, detection",
}
# files of studies whose runs have the settings of recipes, by the first word of their names
MEASURED = {
    "omniglot": "omniglot-nvidia-h200.csv",
    "cells": "detection-cells-nvidia-h200.csv",
    "shapes": "detection-shapes-nvidia-h200.csv",
}


def write(folder: Path) -> None:
    """Write every page whose content changed."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    pages = api_pages()
    for name, text in pages.items():
        _replace(folder / "api" / f"{name}.rst", text)
    _replace(folder / "api.rst", api_index(list(pages)))
    _replace(folder / "recipes.md", recipes_page())
    shutil.copy2(ROOT / "examples" / "glyphs.ipynb", folder / "glyphs.ipynb")


def _replace(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def api_index(pages: Sequence[str]) -> str:
    """The page that lists the others."""
    entries = "\n".join(f"   api/{name}" for name in pages)
    return f"API reference\n=============\n\n``import rankgrad as rg``\n\n.. toctree::\n   :maxdepth: 1\n\n{entries}\n"


def api_pages() -> dict[str, str]:
    """Every public name, a page for each kind."""
    parts = {title: _section(title, "rankgrad", names) for title, names in _own_names().items()}
    own = {id(getattr(rg, each)) for each in rg.__all__}
    for name, title in SECTIONS.items():
        module = importlib.import_module(name)
        parts[title] = _section(title, name, [each for each in _public(module) if id(getattr(module, each)) not in own])
    return {
        title.lower().replace(",", "").replace(" ", "_").replace("-", "_"): "\n".join(lines) for title, lines in parts.items()
    }


def _own_names() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {
        title: [] for title in ("Losses", "Rankers", "Objectives", "Relevance", "Training", "Evaluation", "Trained models")
    }
    for name in rg.__all__:
        value = getattr(rg, name)
        groups[_title_of(value)].append(name)
    return groups


def _title_of(value: object) -> str:
    package = getattr(value, "__module__", "").split(".")[1:2]
    is_class = inspect.isclass(value)
    if is_class and issubclass(value, Ranker):  # type: ignore[arg-type]
        return "Rankers"
    if package == ["losses"]:
        return "Losses" if not is_class or issubclass(value, nn.Module) else "Objectives"  # type: ignore[arg-type]
    titles = {"ops": "Relevance", "train": "Training", "eval": "Evaluation"}
    if value is rg.Ranks:
        return "Objectives"
    return titles.get(package[0] if package else "", "Trained models")


def _public(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if callable(getattr(module, name)) and not _is_alias(getattr(module, name))]
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_") and callable(getattr(module, name))]


def _is_alias(value: object) -> bool:
    """`Literal[...]`, which is callable and documents nothing."""
    return not (inspect.isclass(value) or inspect.isfunction(value))


def _section(title: str, module: str, names: Sequence[str]) -> list[str]:
    parts = [title, "=" * len(title), ""]
    if module != "rankgrad":
        parts += [f"``{module}``", ""]
    parts += [f".. currentmodule:: {module}", "", ".. autosummary::", "", *(f"   {name}" for name in names), ""]
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value):
            parts += [f".. autoclass:: {name}", "   :members:", ""]
        else:
            parts += [f".. autofunction:: {name}", ""]
    return parts


def recipes_page() -> str:
    """The catalogue as tables, a section for each data set."""
    by_data: dict[str, list[Recipe]] = {}
    for recipe in RECIPES.values():
        kind = "voc" if isinstance(recipe, DetectionRecipe) and recipe.name.startswith("voc") else recipe.data_set
        by_data.setdefault(kind, []).append(recipe)
    parts = []
    for data_set, recipes in by_data.items():
        parts += [f"## {DATA_TITLES.get(data_set, data_set)}", "", *_table(recipes), ""]
    return "\n".join(parts)


def _table(recipes: Sequence[Recipe]) -> Iterator[str]:
    rows = [(recipe, _published(recipe), _measured(recipe)) for recipe in recipes]
    columns = ["recipe", "what", *(["published"] if any(row[1] for row in rows) else [])]
    columns += ["measured here"] if any(row[2] for row in rows) else []
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for recipe, published, measured in rows:
        cells = [f"`{recipe.name}`", _escape(recipe.what)]
        cells += [published] if "published" in columns else []
        cells += [measured] if "measured here" in columns else []
        yield f"| {' | '.join(cells)} |"


def _published(recipe: Recipe) -> str:
    shown = [number for number in recipe.published if not number.split.startswith("mean")] or list(recipe.published)
    if not shown:
        return ""
    return _escape(f"{', '.join(map(_number, shown[:4]))} ({shown[0].source})")


def _number(number: Published) -> str:
    split = "" if number.split == "test" else f" {number.split}"
    return f"{number.metric}{split} {'diverged' if number.value is None else f'{number.value:.1f}'}"


def _measured(recipe: Recipe) -> str:
    """Mean and deviation of the runs of a study that had the recipe's own settings."""
    shown = "AP50" if isinstance(recipe, DetectionRecipe) else "R@1"
    name = MEASURED.get(recipe.name.split("-")[0])
    if name is None:
        return ""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # the first group of a study compares losses and leaves all else as the recipe has it
    compared = [row for row in rows if row["group"] == rows[0]["group"] and row["split"] == "test"]
    values = [100 * float(row[shown]) for row in compared if _fits(recipe, row)]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"[{shown} {statistics.fmean(values):.1f}{spread}](../benchmarks/results/{name})"


def _fits(recipe: Recipe, row: dict[str, str]) -> bool:
    changes = dict(change.split("=", 1) for change in row.get("changes", "").split())
    return "loss" in changes and all(text in _written(recipe, name) for name, text in changes.items())


def _written(recipe: Recipe, name: str) -> tuple[str, str]:
    """How a study may write the value of a setting."""
    value = getattr(recipe, name, None)
    if name == "ks" and getattr(recipe, "simix", False) and value == PAPER_KS:
        value = PAPER_KS_WITH_SIMIX
    return str(value), format_value(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
