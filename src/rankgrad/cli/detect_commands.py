"""`rankgrad detect`: train, eval, report, study, plan and recipes of detectors."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad._messages import did_you_mean
from rankgrad.cli.parser import Parser, add_settings, changed_settings, device_named
from rankgrad.cli.show_commands import report_parser, report_path, show_recipes
from rankgrad.cli.train_commands import parse_seeds
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.detection.detection_report import write_report
from rankgrad.detection.detection_task import DetectionTask
from rankgrad.recipes.catalogue import find, recipes_of
from rankgrad.recipes.studies import studies_of
from rankgrad.runs.pipeline import evaluate_run, resume_run, start_run
from rankgrad.runs.recipe import settings_of
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext

Verb = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str]) -> int:
    """Hands the arguments to the verb that stands first among them."""
    width = max(map(len, VERBS))
    parser = Parser(
        "rankgrad detect",
        "Object detection with RaMBO's AP loss.",
        epilog="\n".join(["verbs:", *(f"  {name:{width}} {verb.__doc__}" for name, verb in VERBS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", metavar="VERB", help=f"one of {', '.join(VERBS)}; VERB --help tells more")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="arguments of the verb")
    chosen = parser.parse_args(list(arguments) or ["--help"])
    if chosen.verb not in VERBS:
        hint = did_you_mean(chosen.verb, VERBS)
        parser.error(f"unknown verb {chosen.verb!r}: {hint}")
    return VERBS[chosen.verb](chosen.rest)


def train(arguments: Sequence[str]) -> int:
    """Train a recipe and test the result."""
    parser = _recipe_parser("rankgrad detect train", "Train a detection recipe and test the result.", arguments)
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run [runs/RECIPE]")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="continue the run in this folder, or in --out",
    )
    given = parser.parse(arguments)
    changes = changed_settings(given, DetectionRecipe)
    if given.resume is not None:
        if given.resume and given.out:
            parser.error("--resume RUN and --out DIR both name the run's folder: give one")
        folder = Path(given.resume) if given.resume else given.out or Path("runs") / _chosen(parser, given, changes).name
        run = RunFolder(folder)
        resume_run(DetectionTask.from_run(run, _place(given), changes), run)
    else:
        recipe = _chosen(parser, given, changes)
        run = RunFolder(given.out or Path("runs") / recipe.name)
        start_run(DetectionTask(recipe, _place(given)), run, debug=given.debug)
    print(f"report: {write_report([run.path], run.path / 'report.html')}")
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Test a trained run again."""
    parser = Parser("rankgrad detect eval", "Test the last checkpoint of a run again.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--score-threshold", metavar="SHARE", help="below which a box is not reported [the run's own]")
    _add_place(parser)
    given = parser.parse(arguments)
    text = given.score_threshold
    changes = {} if text is None else {"score_threshold": settings_of(DetectionRecipe)["score_threshold"].parse(text)}
    run = RunFolder(given.run)
    evaluate_run(DetectionTask.from_run(run, _place(given), changes), run)
    print(f"report: {write_report([given.run], given.run / 'report.html')}")
    return 0


def report(arguments: Sequence[str]) -> int:
    """Make one HTML page of runs: AP of classes, curves, images with boxes."""
    parser = report_parser("rankgrad detect report", "Write one HTML page about a run or several; it opens offline.")
    given = parser.parse(arguments)
    out = write_report(given.runs, report_path(given.runs, given.out))
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def recipes(arguments: Sequence[str]) -> int:
    """List the paper's rows that can be trained, or show one whole."""
    return show_recipes(arguments, DetectionRecipe)


def plan(arguments: Sequence[str]) -> int:
    """Measure a step of a recipe on this machine, and the loss's part in it."""
    from rankgrad.runs.step_cost import step_cost_of

    parser = _recipe_parser("rankgrad detect plan", "Measure a training step and the classification loss in it.", arguments)
    given = parser.parse(arguments)
    recipe = _chosen(parser, given, changed_settings(given, DetectionRecipe))
    print(f"{recipe.name}: {recipe.what}\n{step_cost_of(DetectionTask(recipe, _place(given)))}")
    return 0


def study(arguments: Sequence[str]) -> int:
    """Cross-entropy against the AP loss with the same budget, several seeds each."""
    from rankgrad.runs.study import run_study

    known = studies_of(DetectionRecipe)
    parser = Parser("rankgrad detect study", "Train with cross-entropy and with the AP loss, with the same budget and seeds.")
    parser.add_argument("study", metavar="STUDY", help=f"one of {', '.join(known)}")
    parser.add_argument("--seeds", metavar="N or A,B", default="3", help="how many seeds, or which [3]")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="a line per run; a table is written beside it [in --out]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the runs [runs/detect-STUDY]")
    parser.add_argument("--debug", action="store_true", help="shrink every run, to see that all of it works")
    _add_place(parser)
    add_settings(parser, DetectionRecipe)
    given = parser.parse(arguments)
    if given.study not in known:
        hint = did_you_mean(given.study, known)
        parser.error(f"there is no study {given.study!r}: {hint}")
    folder = given.out or Path("runs") / f"detect-{given.study}{'-debug' if given.debug else ''}"
    seeds, changes = parse_seeds(given.seeds), changed_settings(given, DetectionRecipe)
    chosen = known[given.study]
    assert isinstance(chosen.base, DetectionRecipe)
    task = DetectionTask(chosen.base, _place(given))
    print(f"\n{run_study(chosen, task, seeds, folder, changes=changes, csv=given.csv, debug=given.debug)}")
    return 0


VERBS: Mapping[str, Verb] = {
    "train": train,
    "eval": evaluate,
    "report": report,
    "recipes": recipes,
    "plan": plan,
    "study": study,
}


def _recipe_parser(prog: str, about: str, arguments: Sequence[str]) -> Parser:
    parser = Parser(prog, about, usage=f"{prog} RECIPE [options]; every setting of a recipe is a flag")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="see `rankgrad detect recipes`")
    parser.add_argument("--debug", action="store_true", help="shrink it to seconds on a CPU; without --data on drawn shapes")
    _add_place(parser)
    known = recipes_of(DetectionRecipe)
    named = next((known[argument] for argument in arguments if argument in known), None)
    add_settings(parser, DetectionRecipe, named)
    return parser


def _add_place(parser: Parser) -> None:
    parser.add_argument("--data", metavar="DIR", type=Path, help="VOCdevkit, or a folder in its layout")
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1 [a GPU where there is one]")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="threads that decode images [2]")


def _chosen(parser: Parser, given: argparse.Namespace, changes: dict[str, Any]) -> DetectionRecipe:
    """The recipe that was named, with the flags' changes."""
    if not given.recipe:
        parser.error("name the recipe; `rankgrad detect recipes` lists them")
    weights = changes.get("weights")
    if isinstance(weights, str) and weights not in ("none", "default"):
        # a run may be resumed from another folder
        changes["weights"] = str(Path(weights).expanduser().resolve())
    recipe = find(given.recipe, DetectionRecipe).with_settings(changes)
    # what the command line says stands, also in a shrunk run
    return recipe.debug_version(has_data=given.data is not None).with_settings(changes) if given.debug else recipe


def _place(given: argparse.Namespace) -> RunContext:
    if given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}")
    data = None if given.data is None else given.data.expanduser().resolve()
    return RunContext(data, device_named(given.device), workers=given.workers)
