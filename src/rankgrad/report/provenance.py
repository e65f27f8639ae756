"""Where numbers come from: settings, hardware, versions, and what of the run's folder was missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from rankgrad.report.comparison import differing_settings
from rankgrad.report.markup import Cell, absent, element, number, paragraph, table, text
from rankgrad.report.run_reader import Run, float_of


def shown(value: object) -> str:
    """A setting as a command line takes it."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(runs: Sequence[Run]) -> str:
    """All settings of one run; of several those that differ."""
    if not any(run.settings for run in runs):
        return absent("recipe.json is missing, so the settings are not known.")
    if len(runs) == 1:
        found = runs[0].settings
        recipe = runs[0].recipe
        told = f"{recipe.get('name', 'unnamed')}: {recipe.get('what', '')}".rstrip(": ")
        notes = recipe.get("notes")
        remarks = [paragraph(text(note), class_="quiet") for note in notes] if isinstance(notes, list) else []
        pairs = [element("div", element("dt", text(name)), element("dd", text(shown(value)))) for name, value in found.items()]
        return paragraph(text(told)) + "".join(remarks) + element("dl", *pairs, class_="settings")
    differing = differing_settings(runs)
    if not differing:
        return paragraph("The runs have the same settings.")
    header: list[Cell] = ["setting", *(text(run.name) for run in runs)]
    rows = [[text(name), *(text(shown(value)) for value in values)] for name, values in differing.items()]
    same = len({name for run in runs for name in run.settings}) - len(differing)
    return paragraph(f"Settings that differ; {same} others are the same.") + table(header, rows)


def hardware(runs: Sequence[Run]) -> str:
    """Machine, versions and command of each run, as its journal begins."""
    parts = []
    for run in runs:
        started = run.entries("start", "resume")
        if len(runs) > 1:
            parts.append(element("h3", text(run.name)))
        if not started:
            parts.append(absent("The journal does not say where the run was made."))
            continue
        pairs = [element("div", element("dt", text(name)), element("dd", text(value))) for name, value in _facts(started[0])]
        parts.append(element("dl", *pairs, class_="settings"))
        command = started[0].get("command")
        if isinstance(command, list):
            parts.append(element("pre", text(" ".join(map(str, command)))))
    return "".join(parts)


def _facts(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = entry.get("hardware")
    versions = entry.get("versions")
    facts = [("began", str(entry.get("time", ""))[:19].replace("T", " ") + " UTC")]
    for name, value in machine.items() if isinstance(machine, Mapping) else ():
        is_size = name == "gpu_memory" and isinstance(value, int)
        facts.append((str(name), f"{value / 2**30:.0f} GiB" if is_size else shown(value)))
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
    """What could not be read or shown; empty where there is nothing to say."""
    told = [f"{run.name}: {problem}" if len(runs) > 1 else problem for run in runs for problem in run.problems]
    items = [element("li", text(each)) for each in (*told, *remarks)]
    return element("ul", *items) if items else ""
