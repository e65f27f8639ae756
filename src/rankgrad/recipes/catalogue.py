"""All recipes by name, and how they are listed."""

from collections.abc import Mapping

from rankgrad._messages import did_you_mean
from rankgrad.recipes import fastap, rambo, recall_at_k, smooth_ap, starters
from rankgrad.runs.recipe import Published, settings_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe


def _by_name() -> dict[str, RetrievalRecipe]:
    rows = [row for table in (fastap, rambo, recall_at_k, smooth_ap, starters) for row in table.recipes()]
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "two recipes share a name"
    return found


RECIPES: Mapping[str, RetrievalRecipe] = _by_name()


def find(name: str) -> RetrievalRecipe:
    """The recipe of that name, or an error with the nearest one."""
    if name not in RECIPES:
        raise ValueError(
            f"there is no recipe {name!r}: {did_you_mean(name, RECIPES, otherwise='`rankgrad recipes` lists all')}"
        )
    return RECIPES[name]


def listing(pattern: str = "") -> str:
    """A line for each recipe whose name, data or text contains `pattern`."""
    chosen = [r for r in RECIPES.values() if pattern.lower() in f"{r.name} {r.data_set} {r.what}".lower()]
    if not chosen:
        raise ValueError(
            f"no recipe contains {pattern!r}: {did_you_mean(pattern, RECIPES, otherwise='`rankgrad recipes` lists all')}"
        )
    rows = [("recipe", "data", "what", "published", "source")]
    rows += [(r.name, r.data_set, r.what, *_headline(r)) for r in chosen]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _headline(recipe: RetrievalRecipe) -> tuple[str, str]:
    if not recipe.published:
        return "", ""
    first = next((number for number in recipe.published if not number.split.startswith("mean")), recipe.published[0])
    split = "" if first.split == "test" else f" {first.split}"
    return f"{first.metric}{split} {percent(first)}", first.source


def percent(number: Published) -> str:
    """As printed in the paper."""
    return "diverged" if number.value is None else f"{number.value:.1f}"


def description(recipe: RetrievalRecipe) -> str:
    """All settings of a recipe with their meaning, its numbers and its notes."""
    entries = [(name, shown(getattr(recipe, name)), entry.help) for name, entry in settings_of(type(recipe)).items()]
    name_width, value_width = (max(len(entry[column]) for entry in entries) for column in (0, 1))
    lines = [f"{recipe.name}: {recipe.what}", ""]
    lines += [f"  {name:{name_width}}  {value:{value_width}}  {about}" for name, value, about in entries]
    if recipe.published:
        lines += ["", "published:"]
        for n in recipe.published:
            lines.append(f"  {n.metric:12} {percent(n):>8}  {n.split:13}  {n.source}{f' ({n.note})' if n.note else ''}")
    if recipe.notes:
        lines += ["", "notes:", *(f"  - {note}" for note in recipe.notes)]
    return "\n".join(lines)


def shown(value: object) -> str:
    """A setting as a command line takes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(shown, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
