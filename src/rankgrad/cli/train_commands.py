"""The verbs that train and test: train, eval, plan, check-equivalence, sweep, study."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from rankgrad._messages import did_you_mean
from rankgrad.cli.launch import launch, without_flag
from rankgrad.cli.parser import Parser, add_settings, changed_settings, device_named
from rankgrad.recipes.catalogue import find, recipes_of, task_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.train.errors import FailedProcessError, TrainingError
from rankgrad.train.processes import Processes, join, launched
from rankgrad.train.sharding import Parallel

CHECKPOINTS = ("best", "last")


def train(arguments: Sequence[str]) -> int:
    """`rankgrad train [RECIPE] --data DIR` or `rankgrad train --resume RUN`."""
    from rankgrad.runs.pipeline import resume_run, start_run
    from rankgrad.runs.retrieval_task import RetrievalTask

    parser = _recipe_parser("rankgrad train", "Train a recipe, or your own images, and test the result.", arguments)
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run [runs/RECIPE]")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="continue the run in this folder, or in --out, where it was stopped",
    )
    parser.add_argument(
        "--tensorboard", action=argparse.BooleanOptionalAction, default=True, help="write curves where tensorboard is installed"
    )
    parser.add_argument("--wandb", metavar="PROJECT", default="", help="send curves to this project at Weights & Biases")
    _add_processes(parser)
    parser.add_argument(
        "--parallel", metavar="ddp|fsdp", default="ddp", help="with several: a copy of the network each, or one divided [ddp]"
    )
    given = parser.parse(arguments)
    if given.parallel not in get_args(Parallel):
        parser.error(f"--parallel must be ddp or fsdp, got {given.parallel!r}")
    changes = changed_settings(given, RetrievalRecipe)
    if given.resume and given.out:
        parser.error("--resume RUN and --out DIR both name the run's folder: give one")
    named = Path(given.resume) if given.resume else given.out
    recipe = None if given.resume else _chosen(given, changes)
    folder = named or _default_folder(recipe or _chosen(given, changes))
    if _is_to_be_launched(given):
        return _launched_training(arguments, given.processes, folder)
    with join(device_named(given.device)) as processes:
        place = replace(_place(given, processes), parallel=given.parallel)
        if given.resume is not None:
            run = RunFolder(folder)
            resume_run(task_of(run, place, changes), run)
            return 0
        assert recipe is not None, "a run that is not resumed has a recipe"
        start_run(RetrievalTask(recipe, place), RunFolder(folder), debug=given.debug)
    return 0


def _launched_training(arguments: Sequence[str], processes: int, folder: Path) -> int:
    try:
        return launch(["train", *without_flag(arguments, "--processes")], processes)
    except FailedProcessError as error:
        run = RunFolder(folder)
        begun = run.recipe_file.is_file()
        resume = f"Continue with: rankgrad train --resume {folder} --processes {processes}"
        way = resume if begun else "Nothing of the run was written: start it again"
        raise TrainingError(f"{error}; {run.checkpoints.describe_last()}. {way}") from error


def evaluate(arguments: Sequence[str]) -> int:
    """`rankgrad eval RUN`."""
    from rankgrad.runs.pipeline import evaluate_run

    parser = Parser("rankgrad eval", "Test a trained run again, under its data set's protocol or another one.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--split", metavar="NAME", action="append", help="what to test on; may be repeated [all test splits]")
    parser.add_argument("--checkpoint", metavar="best|last", help="which weights [best where there is one, else last]")
    parser.add_argument("--protocol", metavar="NAME", help="another protocol than the data set's own; see `rankgrad protocols`")
    _add_place(parser)
    _add_processes(parser)
    given = parser.parse(arguments)
    if given.checkpoint not in (None, *CHECKPOINTS):
        parser.error(f"--checkpoint must be best or last, got {given.checkpoint!r}")
    if _is_to_be_launched(given):
        return launch(["eval", *without_flag(arguments, "--processes")], given.processes)
    with join(device_named(given.device)) as processes:
        place = _place(given, processes)
        run = RunFolder(given.run)
        task = task_of(run, place)
        evaluate_run(task, run, splits=given.split, checkpoint=given.checkpoint, protocol=given.protocol)
    return 0


def plan(arguments: Sequence[str]) -> int:
    """`rankgrad plan RECIPE`."""
    from rankgrad.runs.retrieval_task import RetrievalTask
    from rankgrad.runs.step_cost import step_cost_of

    parser = _recipe_parser("rankgrad plan", "Measure a step of a recipe on this machine: time, memory, chunk size.", arguments)
    given = parser.parse(arguments)
    recipe = _chosen(given, changed_settings(given, RetrievalRecipe))
    print(f"{recipe.name}: {recipe.what}\n{step_cost_of(RetrievalTask(recipe, _place(given)))}")
    return 0


def check_equivalence(arguments: Sequence[str]) -> int:
    """`rankgrad check-equivalence RECIPE --data DIR --processes 2`."""
    from rankgrad.runs.equivalence import compare_processes
    from rankgrad.runs.retrieval_task import RetrievalTask

    parser = _recipe_parser(
        "rankgrad check-equivalence",
        "Show that several processes compute the loss, gradients and metrics of one: a small batch in float64 on the CPU.",
        arguments,
    )
    _add_processes(parser, "how many to compare with one [2]", default=2)
    parser.add_argument("--images", metavar="N", type=int, default=15, help="of the batch [15, which 2 or 4 share unevenly]")
    parser.add_argument("--parallel", metavar="ddp|fsdp", default="ddp", help="how the network is spread [ddp]")
    given = parser.parse(arguments)
    if not given.recipe and given.data is None:
        parser.error("name a recipe, or your own images with --data; `rankgrad recipes` lists recipes")
    if given.parallel not in get_args(Parallel):
        parser.error(f"--parallel must be ddp or fsdp, got {given.parallel!r}")
    if given.images < given.processes:
        parser.error(f"--images must be at least the {given.processes} processes, got {given.images}")
    recipe = _chosen(given, changed_settings(given, RetrievalRecipe))
    if _is_to_be_launched(given):
        return launch(["check-equivalence", *without_flag(arguments, "--processes")], given.processes)
    with join(torch.device("cpu")) as processes:
        place = replace(_place(given, processes), device=processes.device, parallel=given.parallel)
        report = compare_processes(RetrievalTask(recipe, place), images=given.images)
        place.say(str(report))
        return 0 if report.agrees else 1


def sweep(arguments: Sequence[str]) -> int:
    """`rankgrad sweep RECIPE --data DIR --grid lr=1e-4,3e-4 --seeds 3`."""
    from rankgrad.runs.retrieval_task import RetrievalTask
    from rankgrad.runs.sweep import parse_grid, run_sweep

    parser = _recipe_parser(
        "rankgrad sweep", "Try a grid of settings on validation classes, then train and test the best on all.", arguments
    )
    parser.add_argument(
        "--grid", metavar="SETTING=V,V", action="append", required=True, help="values to try; may be repeated, all are combined"
    )
    parser.add_argument("--seeds", metavar="N or A,B", default="1", help="how many seeds, or which [1]")
    parser.add_argument("--metric", metavar="NAME", default="R@1", help="what validation compares [R@1]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the sweep [runs/sweep-RECIPE]")
    given = parser.parse(arguments)
    recipe = _chosen(given, changed_settings(given, RetrievalRecipe))
    folder = given.out or Path("runs") / f"sweep-{recipe.name}"
    task = RetrievalTask(recipe, _place(given))
    found = run_sweep(task, parse_grid(given.grid), parse_seeds(given.seeds), folder, metric=given.metric)
    print(f"\n{found.report()}\n\nevery run: {folder / 'runs.csv'}, {folder / 'sweep.json'}")
    return 0


def study(arguments: Sequence[str]) -> int:
    """`rankgrad study omniglot --data DIR`."""
    from rankgrad.recipes.studies import studies_of
    from rankgrad.runs.retrieval_task import RetrievalTask
    from rankgrad.runs.study import run_study

    known = studies_of(RetrievalRecipe)
    parser = Parser("rankgrad study", "Run the papers' ablations on one data set and print them as a table.")
    parser.add_argument("study", metavar="STUDY", help=f"one of {', '.join(known)}")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only the lines whose group or label contains this")
    parser.add_argument("--seeds", metavar="N or A,B", default="1", help="how many seeds, or which [1]")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="a line per run; a table is written beside it [in --out]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the runs [runs/study-STUDY]")
    parser.add_argument("--debug", action="store_true", help="shrink every run, to see that all of it works")
    _add_place(parser)
    add_settings(parser, RetrievalRecipe)
    given = parser.parse(arguments)
    if given.study not in known:
        hint = did_you_mean(given.study, known)
        parser.error(f"there is no study {given.study!r}: {hint}")
    chosen = known[given.study]
    assert isinstance(chosen.base, RetrievalRecipe)
    task, changes = RetrievalTask(chosen.base, _place(given)), changed_settings(given, RetrievalRecipe)
    folder = given.out or Path("runs") / f"study-{chosen.name}{'-debug' if given.debug else ''}"
    seeds = parse_seeds(given.seeds)
    text = run_study(
        chosen, task, seeds, folder, changes=changes, only=given.only, csv=given.csv, debug=given.debug
    )  # fmt: skip
    print(f"\n{text}")
    return 0


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` is three seeds, 0, 1 and 2; `0,5` is those two."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise ValueError(f"--seeds must be a number of seeds or several seeds with commas, got {text!r}")
    seeds = tuple(map(int, parts))
    if "," not in text:
        if not seeds[0]:
            raise ValueError("--seeds must be at least 1, got 0")
        return tuple(range(seeds[0]))
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds must differ from each other, got {text}")
    return seeds


def _recipe_parser(prog: str, about: str, arguments: Sequence[str]) -> Parser:
    parser = Parser(prog, about, usage=f"{prog} [RECIPE] [options]; every setting of a recipe is a flag")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="see `rankgrad recipes` [images of your own]")
    parser.add_argument("--debug", action="store_true", help="shrink it to a minute on a CPU, to see that all of it works")
    _add_place(parser)
    known = recipes_of(RetrievalRecipe)
    named = next((argument for argument in arguments if argument in known), "own-images")
    add_settings(parser, RetrievalRecipe, known[named])
    return parser


def _add_place(parser: Parser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="where the images are: a folder, or a CSV file that lists them"
    )
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1 [a GPU where there is one]")
    parser.add_argument(
        "--cache", metavar="DIR", help="folder for decoded images, 'none': memory [$RANKGRAD_CACHE or ~/.cache/rankgrad]"
    )
    parser.add_argument("--workers", metavar="N", type=int, help="threads that decode images [one per core]")


def _add_processes(parser: Parser, about: str = "run so many processes of this machine together", default: int = 1) -> None:
    parser.add_argument("--processes", metavar="N", type=int, default=default, help=f"{about}; torchrun works too")


def _is_to_be_launched(given: object) -> bool:
    """Whether this process is to start the others; those find torchrun's environment."""
    processes = vars(given)["processes"]
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    return processes > 1 and not launched()


def _place(given: object, processes: Processes | None = None) -> RunContext:
    values = vars(given)
    if processes is None and launched():
        raise ValueError("this verb runs in one process; torchrun is for train, eval and check-equivalence")
    device = device_named(values["device"]) if processes is None else processes.device
    cache = values["cache"] or os.environ.get("RANKGRAD_CACHE") or Path.home() / ".cache" / "rankgrad"
    if values["workers"] is not None and values["workers"] < 1:
        raise ValueError(f"--workers must be at least 1, got {values['workers']}")
    data = values["data"]
    return RunContext(
        data=None if data is None else data.expanduser().resolve(),
        device=device,
        cache=None if cache == "none" else Path(cache).expanduser(),
        workers=values["workers"],
        tensorboard="auto" if values.get("tensorboard") else "off",
        wandb=values.get("wandb", ""),
        processes=processes or Processes(device=device),
    )


def _chosen(given: object, changes: dict[str, object]) -> RetrievalRecipe:
    """The recipe that was named, or the one for images of one's own, with the flags' changes."""
    values = vars(given)
    recipe = find(values["recipe"] or "own-images")
    if recipe.name == "own-images" and "data_set" not in changes and _is_csv(values["data"]):
        recipe = replace(recipe, data_set="csv")
    weights = changes.get("weights")
    if isinstance(weights, str) and weights not in ("none", "default"):
        # a run may be resumed from another folder
        changes["weights"] = str(Path(weights).expanduser().resolve())
    recipe = recipe.with_settings(changes)
    # what the command line says stands, also in a shrunk run
    return recipe.debug_version().with_settings(changes) if values["debug"] else recipe


def _is_csv(data: Path | None) -> bool:
    if data is None:
        return False
    return data.suffix.lower() == ".csv" or (data / "dataset.csv").is_file()


def _default_folder(recipe: RetrievalRecipe) -> Path:
    return Path("runs") / recipe.name
