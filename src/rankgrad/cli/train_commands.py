"""The commands that train and test: train, eval, plan, compile, study, sweep, check-equivalence.

Those of `rankgrad detect` are the same functions, called with another task.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from rankgrad._messages import did_you_mean
from rankgrad.cli.embedding_command import add_embedding_files, evaluate_embeddings
from rankgrad.cli.launch import launch, without_flag
from rankgrad.cli.parser import Parser, add_settings, changed_settings, device_named
from rankgrad.cli.show_commands import next_steps, steps_after_training
from rankgrad.cli.study_jobs import parse_share, run_jobs
from rankgrad.data.readers import own_data_set
from rankgrad.data.readers.records import column_names
from rankgrad.models import is_text_folder
from rankgrad.recipes.catalogue import TASKS, TaskKind, find, recipes_of, task_of
from rankgrad.runs.recipe import Recipe, flag_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RETRIEVAL, RunContext, Task
from rankgrad.train.errors import FailedProcessError, TrainingError
from rankgrad.train.processes import SILENCE_LIMIT, Processes, join, launched
from rankgrad.train.sharding import Parallel

CHECKPOINTS = ("best", "last", "untrained")
COLUMN_SETTINGS = ("text_column", "label_column", "pair_columns", "image_column")


def detect(arguments: Sequence[str]) -> int:
    """`rankgrad detect COMMAND`."""
    from rankgrad.cli import DETECT_COMMANDS, call_command

    return call_command(DETECT_COMMANDS, list(arguments), prog=TASKS["detection"].command)


def train(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad train [RECIPE] --data DIR` or `rankgrad train --resume RUN`."""
    from rankgrad.runs.pipeline import resume_run, start_run

    kind = TASKS[task]
    parser = _recipe_parser(kind, "train", "Train a recipe, or your own data, and test the result.", arguments)
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run [runs/RECIPE]")
    parser.add_argument(
        "--resume", metavar="RUN", nargs="?", const="", help="continue the run in this folder, or in --out, where it stopped"
    )
    parser.add_argument(
        "--tensorboard", action=argparse.BooleanOptionalAction, default=True, help="write curves where tensorboard is installed"
    )
    parser.add_argument("--wandb", metavar="PROJECT", default="", help="send curves to this project at Weights & Biases")
    parser.add_argument("--trackio", metavar="PROJECT", default="", help="send curves to this project of trackio")
    parser.add_argument("--mlflow", metavar="EXPERIMENT", default="", help="send curves to this experiment of MLflow")
    _add_processes(parser, kind)
    _add_parallel(parser, kind)
    given = parser.parse(arguments)
    changes = _changes(given, kind)
    if given.resume and given.out:
        parser.error("--resume RUN and --out DIR both name the folder of the run: give one of them")
    recipe = None if given.resume else _chosen_recipe(parser, kind, given, changes)
    if recipe is not None:
        _check_evaluation_is_possible(parser, recipe, changes)
    run = RunFolder(Path(given.resume) if given.resume else given.out or Path("runs") / (recipe.name if recipe else ""))
    if _must_launch(given):
        return _launch_training(arguments, given.processes, run)
    with _join(given) as processes:
        context = _context(given, processes)
        if given.resume is not None:
            opened = task_of(run, context, changes)
            _check_evaluation_is_possible(parser, opened.recipe, changes)
            resume_run(opened, run)
        else:
            assert recipe is not None, "a run that is not resumed has a recipe"
            opened = kind.make(recipe, context)
            start_run(opened, run, debug=given.debug)
        if processes.first:
            _write_detection_report(run, opened)
            print(f"\n{next_steps(steps_after_training(run, opened))}")
    return 0


def _write_detection_report(run: RunFolder, task: Task) -> None:
    """The report of a detector is a file of its run."""
    if task.name == RETRIEVAL:
        return
    from rankgrad.detection.detection_report import write_report

    print(f"report: {write_report([run.path], run.path / 'report.html')}")


def _check_evaluation_is_possible(parser: Parser, recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Refuse flags about evaluation while training where there is nothing to evaluate on."""
    if isinstance(recipe, RetrievalRecipe) and recipe.validation == "none":
        for name in ("evaluate_every", "patience"):
            if changes.get(name):
                parser.error(f"{flag_of(name)} needs classes to evaluate on while training: add --validation half")


def _launch_training(arguments: Sequence[str], processes: int, run: RunFolder) -> int:
    try:
        return launch(["train", *without_flag(arguments, "--processes")], processes)
    except FailedProcessError as error:
        resume = f"Continue with: rankgrad train --resume {run.path} --processes {processes}"
        advice = resume if run.recipe_file.is_file() else "Nothing of the run was written: start it again"
        raise TrainingError(f"{error}; {run.checkpoints.describe_last()}. {advice}") from error


def evaluate(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad eval RUN`."""
    from rankgrad.runs.pipeline import evaluate_run

    kind = TASKS[task]
    parser = Parser(f"{kind.command} eval", "Test a trained run again, on its own data or on other data.")
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="folder of the run")
    parser.add_argument("--split", metavar="NAME", action="append", help="what to test on; may be repeated [all test splits]")
    parser.add_argument(
        "--checkpoint",
        metavar="|".join(CHECKPOINTS),
        help="which weights; 'untrained': those that training began with [best where there is one, else last]",
    )
    if task == RETRIEVAL:
        parser.add_argument("--protocol", metavar="NAME", help="evaluation protocol, see `rankgrad protocols` [the data set's]")
        add_embedding_files(parser)
    _add_context(parser, kind)
    _add_processes(parser, kind)
    add_settings(parser, kind.recipe, only=kind.recipe.mutable_on_resume)
    given = parser.parse(arguments)
    if given.checkpoint not in (None, *CHECKPOINTS):
        parser.error(f"--checkpoint must be {', '.join(CHECKPOINTS[:-1])} or {CHECKPOINTS[-1]}, got {given.checkpoint!r}")
    if task == RETRIEVAL and (given.embeddings or given.gallery):
        return evaluate_embeddings(parser, given)
    if given.run is None:
        parser.error("name the folder of a run" + (", or embeddings with --embeddings" if task == RETRIEVAL else ""))
    if _must_launch(given):
        return launch(["eval", *without_flag(arguments, "--processes")], given.processes)
    run = RunFolder(given.run)
    with _join(given) as processes:
        opened = task_of(run, _context(given, processes), _changes(given, kind))
        evaluate_run(opened, run, splits=given.split, checkpoint=given.checkpoint, protocol=vars(given).get("protocol"))
        if processes.first:
            _write_detection_report(run, opened)
    return 0


def plan(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad plan RECIPE`."""
    from rankgrad.runs.step_cost import step_cost_of

    kind = TASKS[task]
    parser = _recipe_parser(kind, "plan", "Measure a training step on this machine: time, memory, chunk size.", arguments)
    given = parser.parse(arguments)
    recipe = _chosen_recipe(parser, kind, given, _changes(given, kind))
    print(f"{recipe.name}: {recipe.what}\n{step_cost_of(kind.make(recipe, _context(given)))}")
    return 0


def compile_ahead(arguments: Sequence[str]) -> int:
    """`rankgrad compile [RECIPE] --gpu h100`."""
    from rankgrad.runs.retrieval_task import RetrievalTask

    kind = TASKS[RETRIEVAL]
    parser = _recipe_parser(
        kind,
        "compile",
        "Compile the kernels that training will need, into Triton's cache (TRITON_CACHE_DIR). No GPU and no data are needed.",
        arguments,
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        action="append",
        required=True,
        help="GPU to compile for: h100, a100, ... or its compute capability, such as 9.0; may be repeated",
    )
    given = parser.parse(arguments)
    recipe = _chosen_recipe(parser, kind, given, _changes(given, kind))
    assert isinstance(recipe, RetrievalRecipe)
    task = RetrievalTask(recipe, replace(_context(given), device=torch.device("cpu")))
    for gpu in given.gpu:
        began = time.perf_counter()
        kernels = task.compile_kernels(gpu)
        print(f"{recipe.name}: {kernels} kernels for {gpu} in {time.perf_counter() - began:.1f} s")
    return 0


def study(arguments: Sequence[str], task: str = RETRIEVAL) -> int:
    """`rankgrad study omniglot --data DIR`."""
    from rankgrad.recipes.studies import studies_of
    from rankgrad.runs.study import run_study

    kind = TASKS[task]
    known = studies_of(kind.recipe)
    seeds = 1 if task == RETRIEVAL else 3
    prefix = "study" if task == RETRIEVAL else "detect"
    parser = Parser(
        f"{kind.command} study",
        "Run the papers' ablations on one data set and print them as a table.",
        usage=f"{kind.command} study STUDY [options]; every setting of a recipe is a flag",
    )
    parser.add_argument("study", metavar="STUDY", help=f"one of {', '.join(known)}")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only the lines whose group or label contains this")
    parser.add_argument("--seeds", metavar="N or A,B", default=str(seeds), help="how many seeds, or which [%(default)s]")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="one line per run; a table is written beside it [in --out]")
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"folder of the runs [runs/{prefix}-STUDY]")
    parser.add_argument(
        "--minutes", metavar="N", type=float, default=0.0, help="stop between two runs after this long; a second call continues"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="lines run at the same time on one device [1]")
    parser.add_argument(
        "--share",
        metavar="I/N",
        default="1/1",
        help="run the I-th of N shares of the lines: N calls with the same --out divide them",
    )
    parser.add_argument("--debug", action="store_true", help="run a tiny version of each, to try everything")
    _add_context(parser, kind)
    add_settings(parser, kind.recipe)
    given = parser.parse(arguments)
    if given.study not in known:
        parser.error(f"there is no study {given.study!r}: {did_you_mean(given.study, known)}")
    chosen = known[given.study]
    folder = given.out or Path("runs") / f"{prefix}-{chosen.name}{'-debug' if given.debug else ''}"
    share, status = parse_share(given.share), 0
    if given.jobs > 1:
        words = [*kind.command.split()[1:], "study", *without_flag(arguments, "--jobs")]
        share, status = (0, 0), run_jobs(words, given.jobs, folder)
    text = run_study(
        chosen,
        kind.make(chosen.base, _context(given)),
        parse_seeds(given.seeds),
        folder,
        changes=_changes(given, kind),
        only=given.only,
        csv=given.csv,
        minutes=given.minutes,
        share=share,
        debug=given.debug,
    )
    print(f"\n{text}")
    return status


def sweep(arguments: Sequence[str]) -> int:
    """`rankgrad sweep RECIPE --data DIR --grid lr=1e-4,3e-4 --seeds 3`."""
    from rankgrad.runs.retrieval_task import RetrievalTask
    from rankgrad.runs.sweep import parse_grid, run_sweep

    kind = TASKS[RETRIEVAL]
    parser = _recipe_parser(
        kind, "sweep", "Try a grid of settings on validation classes, then train and test the best on all.", arguments
    )
    parser.add_argument(
        "--grid", metavar="SETTING=V,V", action="append", required=True, help="values to try; may be repeated, all are combined"
    )
    parser.add_argument("--seeds", metavar="N or A,B", default="1", help="how many seeds, or which [1]")
    parser.add_argument("--metric", metavar="NAME", default="R@1", help="validation metric to compare [R@1]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the sweep [runs/sweep-RECIPE]")
    given = parser.parse(arguments)
    recipe = _chosen_recipe(parser, kind, given, _changes(given, kind))
    assert isinstance(recipe, RetrievalRecipe)
    folder = given.out or Path("runs") / f"sweep-{recipe.name}"
    grid, seeds = parse_grid(given.grid), parse_seeds(given.seeds)
    found = run_sweep(RetrievalTask(recipe, _context(given)), grid, seeds, folder, metric=given.metric)
    print(f"\n{found.report()}\n\nevery run: {folder / 'runs.csv'}, {folder / 'sweep.json'}")
    return 0


def check_equivalence(arguments: Sequence[str]) -> int:
    """`rankgrad check-equivalence RECIPE --data DIR --processes 2`."""
    from rankgrad.runs.equivalence import compare_processes
    from rankgrad.runs.retrieval_task import RetrievalTask

    kind = TASKS[RETRIEVAL]
    parser = _recipe_parser(
        kind,
        "check-equivalence",
        "Verify that several processes compute the loss, gradients and metrics of one: a small batch in float64 on the CPU.",
        arguments,
    )
    _add_processes(parser, kind, "number of local processes to compare with one [2]", default=2)
    _add_parallel(parser, kind)
    parser.add_argument(
        "--images", metavar="N", type=int, default=15, help="images in the batch [15, which 2 or 4 processes share unevenly]"
    )
    given = parser.parse(arguments)
    if not given.recipe and given.data is None:
        parser.error("name a recipe, or your own images with --data; `rankgrad recipes` lists recipes")
    if given.images < given.processes:
        parser.error(f"--images must be at least the number of processes ({given.processes}), got {given.images}")
    recipe = _chosen_recipe(parser, kind, given, _changes(given, kind))
    assert isinstance(recipe, RetrievalRecipe)
    if _must_launch(given):
        return launch(["check-equivalence", *without_flag(arguments, "--processes")], given.processes)
    with join(torch.device("cpu")) as processes:
        context = _context(given, processes)
        report = compare_processes(RetrievalTask(recipe, context), images=given.images)
        context.say(str(report))
        return 0 if report.agrees else 1


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` is three seeds, 0, 1 and 2; `0,5` is those two."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise ValueError(f"--seeds must be a number of seeds, or several seeds separated by commas, got {text!r}")
    seeds = tuple(map(int, parts))
    if "," not in text:
        if not seeds[0]:
            raise ValueError("--seeds must be at least 1, got 0")
        return tuple(range(seeds[0]))
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds must differ from each other, got {text}")
    return seeds


def _recipe_parser(kind: TaskKind, name: str, description: str, arguments: Sequence[str]) -> Parser:
    """A parser of RECIPE and its settings, whose help shows the values of the recipe that was named."""
    prog, known = f"{kind.command} {name}", recipes_of(kind.recipe)
    recipe = "[RECIPE]" if kind.default else "RECIPE"
    parser = Parser(prog, description, usage=f"{prog} {recipe} [options]; every setting of a recipe is a flag")
    default = f" [{kind.default}]" if kind.default else ""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=f"see `{kind.command} recipes`{default}")
    parser.add_argument("--debug", action="store_true", help="run a tiny version within a minute on a CPU, to try everything")
    _add_context(parser, kind)
    named = next((argument for argument in arguments if argument in known), kind.default)
    add_settings(parser, kind.recipe, known.get(named))
    return parser


def _add_context(parser: Parser, kind: TaskKind) -> None:
    parser.add_argument("--data", metavar="DIR", type=Path, help=kind.data)
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda or cuda:1 [a GPU where there is one]")
    parser.add_argument(
        "--cache", metavar="DIR", help="folder for decoded images, 'none': memory [$RANKGRAD_CACHE or ~/.cache/rankgrad]"
    )
    parser.add_argument("--workers", metavar="N", type=int, help=f"threads or processes that decode images [{kind.workers}]")


def _add_processes(parser: Parser, kind: TaskKind, help_text: str = "number of local processes [1]", default: int = 1) -> None:
    if kind.distributed:
        parser.add_argument("--processes", metavar="N", type=int, default=default, help=f"{help_text}; torchrun works too")
        parser.add_argument(
            "--process-timeout",
            metavar="SECONDS",
            type=float,
            default=SILENCE_LIMIT,
            help=f"end the run when one of several processes has not responded for this long [{SILENCE_LIMIT:.0f}]",
        )


def _join(given: argparse.Namespace) -> AbstractContextManager[Processes]:
    """The processes of this command."""
    limit = vars(given).get("process_timeout", SILENCE_LIMIT)
    if not limit > 0:
        raise ValueError(f"--process-timeout must be a number of seconds above 0, got {limit:g}")
    return join(device_named(given.device), silence_limit=limit)


def _add_parallel(parser: Parser, kind: TaskKind) -> None:
    if kind.distributed:
        parser.add_argument(
            "--parallel",
            choices=get_args(Parallel),
            default="ddp",
            help="with several processes: 'ddp': each has a copy of the network; 'fsdp': it is sharded [ddp]",
        )


def _must_launch(given: argparse.Namespace) -> bool:
    """Whether this process must start the others; those find the environment of torchrun."""
    processes = int(vars(given).get("processes", 1))
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    return processes > 1 and not launched()


def _context(given: argparse.Namespace, processes: Processes | None = None) -> RunContext:
    """Where and how to run, as the command line says it."""
    if processes is None and launched():
        raise ValueError("this command runs in one process; torchrun is for train, eval and check-equivalence")
    if given.workers is not None and given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}")
    device = device_named(given.device) if processes is None else processes.device
    cache = given.cache or os.environ.get("RANKGRAD_CACHE") or Path.home() / ".cache" / "rankgrad"
    context = RunContext(
        data=None if given.data is None else given.data.expanduser().resolve(),
        device=device,
        cache=None if cache == "none" else Path(cache).expanduser(),
        workers=given.workers,
        processes=processes or Processes(device=device),
    )
    options = vars(given)
    return replace(
        context,
        tensorboard="auto" if options.get("tensorboard") else "off",
        wandb=options.get("wandb", ""),
        trackio=options.get("trackio", ""),
        mlflow=options.get("mlflow", ""),
        parallel=options.get("parallel", "ddp"),
    )


def _changes(given: argparse.Namespace, kind: TaskKind) -> dict[str, Any]:
    """The settings of the flags, with absolute paths: a run may be resumed or tested from another folder."""
    changes = changed_settings(given, kind.recipe)
    if is_text_folder(changes.get("trunk", "")):
        changes["trunk"] = str(Path(changes["trunk"]).expanduser().resolve())
    if changes.get("weights", "none") not in ("none", "default"):
        changes["weights"] = str(Path(changes["weights"]).expanduser().resolve())
    if changes.get("image_root"):
        # links stay: absolute paths in the CSV file begin with what was typed
        changes["image_root"] = str(Path(changes["image_root"]).expanduser().absolute())
    return changes


def _chosen_recipe(parser: Parser, kind: TaskKind, given: argparse.Namespace, changes: dict[str, Any]) -> Recipe:
    """The recipe that was named, or the default one, with the changes of the flags."""
    name = given.recipe or kind.default
    if not name:
        parser.error(f"name the recipe; `{kind.command} recipes` lists them")
    recipe = find(name, kind.recipe)
    if isinstance(recipe, RetrievalRecipe) and not given.recipe and "data_set" not in changes and given.data is not None:
        recipe = _recipe_for(given.data, recipe, changes)
    recipe = recipe.with_settings(changes)
    # what the command line says also holds for the debug version
    return recipe.debug_version(has_data=given.data is not None).with_settings(changes) if given.debug else recipe


def _recipe_for(data: Path, recipe: RetrievalRecipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe for a user's own data: texts by the columns of the file or by the trunk, images by the weights."""
    data = data.expanduser()
    columns = replace(recipe, **{name: changes[name] for name in COLUMN_SETTINGS if name in changes}).columns
    found = "texts" if is_text_folder(changes.get("trunk", "")) else own_data_set(data, columns)
    if found == "texts":
        return find("own-pairs" if columns.are_pairs(column_names(data)) else "own-texts")
    own = find("own-images-scratch") if changes.get("weights") == "none" else recipe
    return replace(own, data_set=found)
