"""The page about retrieval runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad.report.comparison import differing_settings, won_and_lost
from rankgrad.report.examples import best_and_worst, confusion_cards
from rankgrad.report.explorer import explorer
from rankgrad.report.groups import EvaluationGroup, chosen_groups
from rankgrad.report.headline import description, numbers, side_by_side
from rankgrad.report.learning_curves import diagnostics, events, learning
from rankgrad.report.markup import Cell, Section, absent, details, document, element, number, paragraph, table, text
from rankgrad.report.retrieval_sections import categories, embedding_map, ranks
from rankgrad.report.run_reader import Evaluation, Run, float_of
from rankgrad.report.thumbnails import Thumbnails

ROWS_ALONE, ROWS_EACH = 5, 3
# where the script puts the queries; without it the examples stay
MOUNT = '<div class="explorer" id="explorer" hidden=""></div>'


def page(runs: Sequence[Run], *, split: str | None = None, thumbnails: Thumbnails | None = None) -> str:
    """One HTML document about one run, or several side by side.

    Args:
        runs: runs to show; the others are compared with the first.
        split: test to show charts and pictures of, by default "test" or the first there is.
        thumbnails: source of the pictures.
    """
    thumbnails = thumbnails or Thumbnails()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    about = description(runs[0]) if len(runs) == 1 else ", ".join(run.name for run in runs)
    groups = chosen_groups(runs, split)
    # its thumbnails first, so that the remarks in the last section know of them
    data = explorer(groups, thumbnails)
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8") if data else ""
    return document(title, about, _sections(runs, groups, split, thumbnails), script=script, data=data)


def _sections(
    runs: Sequence[Run], groups: Sequence[EvaluationGroup], split: str | None, thumbnails: Thumbnails
) -> list[Section]:
    alone = len(runs) == 1
    sections = [("numbers", "Numbers", numbers(runs[0], split) if alone else side_by_side(runs))]
    if not alone:
        sections.append(("wins", "Won and lost", won_and_lost(groups, thumbnails)))
    each = ROWS_ALONE if alone else ROWS_EACH
    examples = _of_each(runs, split, lambda test: best_and_worst(test, thumbnails, each=each))
    sections += [
        ("queries", "Queries", MOUNT + element("div", examples, class_="static")),
        ("confusions", "Confusions", _of_each(runs, split, lambda test: confusion_cards(test, thumbnails))),
        ("map", "Map of the embeddings", embedding_map(groups, thumbnails)),
        ("ranks", "Ranks", ranks(groups)),
        ("categories", "Categories", categories(groups)),
        ("learning", "Learning curves", learning(runs)),
        ("diagnostics", "Diagnostics", _folded("What the loss does not show", diagnostics(runs))),
        ("settings", "Settings", _folded("All settings", settings(runs)) if alone else settings(runs)),
        ("hardware", "Hardware and versions", _folded("Where and with what the runs were made", hardware(runs))),
        ("events", "Events", _folded("Resumes, warnings, ends", events(runs))),
    ]
    # last, when all thumbnails have been made
    return [*sections, ("missing", "Missing", missing(runs, thumbnails.remarks()))]


def _folded(title: str, content: str) -> str:
    return details(title, content) if content else ""


def _of_each(runs: Sequence[Run], split: str | None, content: Callable[[Evaluation], str]) -> str:
    parts = []
    for place, run in enumerate(runs):
        test = run.evaluation(split)
        part = content(test) if test else absent("Not tested yet.")
        parts.append(part if len(runs) == 1 else details(run.name, part, is_open=not place))
    return "".join(parts)


def format_value(value: object) -> str:
    """A setting as on the command line."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(runs: Sequence[Run]) -> str:
    """All settings of one run, or those that differ between several."""
    if not any(run.settings for run in runs):
        return ""
    if len(runs) == 1:
        found = runs[0].settings
        recipe = runs[0].recipe
        told = f"{recipe['name']}: {recipe.get('what', '')}".rstrip(": ") if recipe.get("name") else ""
        notes = recipe.get("notes")
        remarks = [paragraph(text(note), class_="quiet") for note in notes] if isinstance(notes, list) else []
        pairs = [
            element("div", element("dt", text(name)), element("dd", text(format_value(value)))) for name, value in found.items()
        ]
        return (paragraph(text(told)) if told else "") + "".join(remarks) + element("dl", *pairs, class_="settings")
    differing = differing_settings(runs)
    if not differing:
        return paragraph("The runs have the same settings.")
    header: list[Cell] = ["setting", *(text(run.name) for run in runs)]
    rows = [[text(name), *(text(format_value(value)) for value in values)] for name, values in differing.items()]
    same = len({name for run in runs for name in run.settings}) - len(differing)
    return paragraph(f"Settings that differ; {same} others are the same.") + table(header, rows)


def hardware(runs: Sequence[Run]) -> str:
    """Machine, versions and command of each run, as its journal begins."""
    if not any(run.entries("start", "resume") for run in runs):
        return ""
    parts = []
    for run in runs:
        started = run.entries("start", "resume")
        if not started:
            part = absent("The journal does not say where the run was made.")
        else:
            facts = _facts(started[0])
            pairs = [element("div", element("dt", text(name)), element("dd", text(value))) for name, value in facts]
            part = element("dl", *pairs, class_="settings")
            command = started[0].get("command")
            if isinstance(command, list):
                part += element("pre", text(" ".join(map(str, command))))
        parts.append(part if len(runs) == 1 else details(run.name, part))
    return "".join(parts)


def _facts(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = entry.get("hardware")
    versions = entry.get("versions")
    facts = [("began", str(entry.get("time", ""))[:19].replace("T", " ") + " UTC")]
    for name, value in machine.items() if isinstance(machine, Mapping) else ():
        is_size = name == "gpu_memory" and isinstance(value, int)
        facts.append((str(name), f"{value / 2**30:.0f} GiB" if is_size else format_value(value)))
    facts += [(str(name), str(value)) for name, value in versions.items()] if isinstance(versions, Mapping) else []
    for name in ("parameters", "steps_per_epoch", "total_steps"):
        if isinstance(entry.get(name), int):
            facts.append((name.replace("_", " "), number(entry[name])))
    data = entry.get("data")
    for split, counts in data.items() if isinstance(data, Mapping) else ():
        if isinstance(counts, Mapping):
            facts.append((f"{split} data", ", ".join(f"{number(float_of(value))} {name}" for name, value in counts.items())))
    return facts


def missing(runs: Sequence[Run], remarks: Sequence[str]) -> str:
    """What could not be read or shown; empty if there is nothing to report."""
    told = [f"{run.name}: {problem}" if len(runs) > 1 else problem for run in runs for problem in run.problems]
    items = [element("li", text(each)) for each in (*told, *remarks)]
    return element("ul", *items) if items else ""
