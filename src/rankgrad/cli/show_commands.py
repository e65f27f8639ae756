"""The commands that show something and train nothing: recipes, protocols, report, figures."""

import argparse
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankgrad._files import replace_file
from rankgrad._messages import did_you_mean, drop_empty_columns, format_duration, printable, table, terminal_width
from rankgrad.cli.parser import Parser, in_flags
from rankgrad.runs.task import RETRIEVAL

if TYPE_CHECKING:
    from rankgrad.report.run_reader import Run
    from rankgrad.runs.recipe import Published, Recipe
    from rankgrad.runs.run_folder import RunFolder
    from rankgrad.runs.task import Task

NUMBERS = "figures.json"


def recipes(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad recipes [NAME or part of it]`."""
    from rankgrad.recipes.catalogue import TASKS, recipes_of

    kind = TASKS[task].recipe
    parser = Parser(f"{TASKS[task].command} recipes", "List the recipes, or show all settings of one.")
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="a recipe, or text that listed recipes contain")
    given = parser.parse(arguments)
    known = recipes_of(kind)
    print(describe_recipe(known[given.name]) if given.name in known else list_recipes(kind, given.name))
    return 0


def list_recipes(kind: "type[Recipe]", pattern: str = "") -> str:
    """What each recipe is whose name, data or text contains `pattern`."""
    from rankgrad.recipes.catalogue import COMMAND_OF, recipes_of

    known = recipes_of(kind)
    chosen = [each for each in known.values() if pattern.lower() in f"{each.name} {each.data_set} {each.what}".lower()]
    if not chosen:
        hint = did_you_mean(pattern, known, otherwise=f"`{COMMAND_OF[kind]} recipes` lists all")
        raise ValueError(f"no recipe contains {pattern!r}: {hint}")
    rows = [(each.name, *_headline(each)) for each in chosen]
    return table(["recipe", "published", "what"], rows, align="lll", width=terminal_width())


def _headline(recipe: "Recipe") -> tuple[str, str]:
    if not recipe.published:
        return "", recipe.what
    first = next((number for number in recipe.published if not number.split.startswith("mean")), recipe.published[0])
    split = "" if first.split == "test" else f" {first.split}"
    # tables may repeat a figure; another one is of something else, which its note says
    of_first = {
        number.value: number
        for number in reversed(recipe.published)
        if (number.metric, number.split) == (first.metric, first.split)
    }
    shown = [number for number in recipe.published if of_first.get(number.value) is number]
    figures = ", ".join(map(_percent, shown))
    sources = "; ".join(number.source if len(shown) == 1 else f"{number.source}, {number.note}" for number in shown)
    return f"{first.metric}{split} {figures}", f"{recipe.what} ({sources})"


def _percent(number: "Published") -> str:
    """As printed in the paper."""
    return "diverged" if number.value is None else f"{number.value:.1f}"


def describe_recipe(recipe: "Recipe") -> str:
    """All settings of a recipe with their meaning, its published numbers and its notes."""
    from rankgrad.runs.recipe import format_value, settings_of

    known = settings_of(type(recipe))
    settings = [
        [name, format_value(getattr(recipe, name)) or "-", recipe.source_of(name) or "", in_flags(entry.description, known)]
        for name, entry in known.items()
    ]
    header, settings = drop_empty_columns(["setting", "value", "from", "meaning"], settings)
    listed = table(header, settings, align="l" * len(header), indent="  ", width=terminal_width())
    parts = [f"{recipe.name}: {recipe.what}", listed]
    if recipe.published:
        rows = [
            (number.metric, _percent(number), number.split, f"{number.source}{f' ({number.note})' if number.note else ''}")
            for number in recipe.published
        ]
        header = ["published", "value", "split", "source"]
        parts.append(table(header, rows, align="lrll", indent="  ", width=terminal_width()))
    if recipe.notes:
        notes = (
            textwrap.fill(note, terminal_width(), initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
            for note in recipe.notes
        )
        parts.append("\n".join(["notes:", *notes]))
    return "\n\n".join(parts)


def protocols(arguments: Sequence[str]) -> int:
    """`rankgrad protocols`."""
    from rankgrad.eval import describe_protocols

    Parser("rankgrad protocols", "List the evaluation protocols and metrics with their definitions.").parse(arguments)
    print(describe_protocols())
    return 0


def report(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad report RUN [RUN...]`."""
    from rankgrad.recipes.catalogue import TASKS

    parser = Parser(f"{TASKS[task].command} report", "Write one HTML page about a run or several; it opens offline.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run; others are compared with the first")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="file to write [RUN/report.html; for several runs report-RUN-RUN.html]"
    )
    if task == RETRIEVAL:
        parser.add_argument("--split", metavar="NAME", help="test split of the curves and pictures [test, or the first]")
        parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="leave out pictures of queries")
    given = parser.parse(arguments)
    out = _report_path(given.runs, given.out)
    if task == RETRIEVAL:
        content = _retrieval_page(given.runs, given.split, pictures=given.pictures)
    else:
        from rankgrad.detection.detection_report import page

        content = page(given.runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)
    print(f"{printable(str(out))} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _retrieval_page(folders: Sequence[Path], split: str | None, *, pictures: bool) -> str:
    from rankgrad.report.page import page
    from rankgrad.report.run_reader import read_runs
    from rankgrad.report.thumbnails import Thumbnails

    runs = read_runs(folders)
    _check_split(runs, split)
    thumbnails = Thumbnails(enabled=pictures)
    content = page(runs, split=split, thumbnails=thumbnails)
    if thumbnails.unreadable:
        print(f"note: {printable(thumbnails.remarks()[0])} If the images moved: rankgrad eval RUN --data DIR", file=sys.stderr)
    return content


def _report_path(runs: Sequence[Path], out: Path | None) -> Path:
    """Where a report goes: without --out into its run, or under a name that says which runs it compares."""
    if out is None:
        names = [run.resolve().name for run in runs]
        # file systems end at 255 bytes
        return runs[0] / "report.html" if len(runs) == 1 else Path(f"{'-'.join(['report', *names])[:100]}.html")
    if out.is_dir():
        raise IsADirectoryError(f"--out must be a file, got the folder {out}: use --out {out / 'report.html'}")
    return out


def _check_split(runs: "Sequence[Run]", split: str | None) -> None:
    known = sorted({name for run in runs for test in run.evaluations.values() for name in (test.key, test.split)})
    if split is not None and split not in known:
        there = f"choose one of {', '.join(known)}" if known else "nothing has been tested yet; run `rankgrad eval RUN`"
        raise ValueError(f"--split must be a split that was tested, got {split!r}: {there}")


def next_steps(steps: Sequence[tuple[str, str]]) -> str:
    """Commands to run next, and what for."""
    return "\n".join(["next:", *(f"  {command}\n      {purpose}" for command, purpose in steps)])


def steps_after_training(run: "RunFolder", task: "Task") -> list[tuple[str, str]]:
    """What users do with a trained network, with the commands filled in."""
    folder = shlex.quote(str(run.path))
    if task.name != RETRIEVAL:
        return [(f"rankgrad detect report {folder} OTHER_RUN", "compare with another run, as one page")]
    data, name = task.context.data, task.recipe.data_set
    noun = "texts" if task.recipe.is_text else "images"
    gallery = shlex.quote(str(run.path / "embeddings" / noun))
    if data is None:
        images = f"--data {name}"
    else:
        images = shlex.quote(str(data)) if name in ("folder", "csv", "texts") else f"--data {shlex.quote(f'{name}:{data}')}"
    return [
        (f"rankgrad report {folder}", f"learning curves, retrieved {noun} and confusions, as one page"),
        (f"rankgrad embed {folder} {images} --out {gallery}", f"embed these {noun}, or any others"),
        (f"rankgrad serve {folder} --index {gallery}", f"search them by {noun.removesuffix('s')} in a browser"),
        (f"rankgrad export {folder}", "a folder for sentence-transformers")
        if task.recipe.is_text
        else (
            f"rankgrad card {folder} --out {shlex.quote(f'{run.path.name}-model')}",
            "a folder to share: weights, model card, ONNX",
        ),
    ]


def figures(arguments: Sequence[str]) -> int:
    """`rankgrad figures [NAME...]`: NAME.svg (or .png) and NAME.txt for each picture, and one file of numbers."""
    from rankgrad.report.figures import pictures
    from rankgrad.report.figures.style import DARK, LIGHT, save

    options = _figure_options(arguments)
    theme, ending = (DARK, "-dark") if options.dark else (LIGHT, "")
    names = options.names or list(pictures.PICTURES)
    for number, name in enumerate(names, start=1):
        picture = pictures.PICTURES[name]
        print(f"{number}/{len(names)} {name}: {picture.shows} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        numbers = picture.compute()
        path = options.out / f"{name}{ending}.{options.format}"
        save(picture.draw(numbers, theme), path, theme, width=options.width)
        text = picture.caption(numbers)
        (options.out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        entry = {"shows": picture.shows, "caption": text, "numbers": pictures.as_json(numbers)}
        _add_numbers(options.out / NUMBERS, name, entry)
        print(f"{number}/{len(names)} {name}: {format_duration(time.perf_counter() - began)}", file=sys.stderr, flush=True)
        print(path, flush=True)
    return 0


def _figure_options(arguments: Sequence[str]) -> argparse.Namespace:
    from rankgrad.report.figures.pictures import PICTURES

    parser = Parser(
        "rankgrad figures",
        "Compute and draw the papers' figures and some of our own, each with its caption and its numbers.",
        epilog="pictures:\n"
        + table(["name", "shows"], [(name, picture.shows) for name, picture in PICTURES.items()], indent="  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help="pictures to draw [all]")
    add("--out", type=Path, default=Path("figures"), metavar="DIR", help="folder to write to [%(default)s]")
    add("--format", choices=("svg", "png"), default="svg", help="file format [%(default)s]")
    add("--width", type=int, default=1920, metavar="PIXELS", help="width of a PNG [%(default)s]")
    add("--dark", action="store_true", help="draw on a dark background, as NAME-dark")
    options = parser.parse(arguments)
    for name in options.names:
        if name not in PICTURES:
            parser.error(f"there is no picture {name!r}: {did_you_mean(name, PICTURES)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"--out must be a folder that can be written to, got {options.out}: {problem.strerror}")
    return options


def _add_numbers(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Add the numbers of a picture to those of the others in the folder."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # no file, or a damaged one: start again
        known = {}
    replace_file(path, json.dumps({**known, name: entry}, ensure_ascii=False) + "\n")
