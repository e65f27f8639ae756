"""The verbs around recipes: train, eval, recipes, check-data, plan, sweep, study, protocols."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankgrad.recipes.catalogue import RECIPES, description, find, listing
from rankgrad.recipes.debug import shrunk
from rankgrad.recipes.flags import Parser, add_settings, changed_settings, device_named
from rankgrad.recipes.recipe import Recipe, nearest
from rankgrad.recipes.shelf import Place, Shelf

CHECKPOINTS = ("best", "last")


def train(arguments: Sequence[str]) -> int:
    """`rankgrad train [RECIPE] --data DIR` or `rankgrad train --resume RUN`."""
    from rankgrad.recipes.run import continue_run, start_run

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
    given = parser.parse(arguments)
    changes = changed_settings(given)
    if given.resume is not None:
        if given.resume and given.out:
            parser.error("--resume RUN and --out DIR both name the run's folder: give one")
        folder = Path(given.resume) if given.resume else given.out or _default_folder(_chosen(given, changes))
        return continue_run(folder, _place(given), changes)
    recipe = _chosen(given, changes)
    start_run(recipe, Shelf(_place(given)), given.out or _default_folder(recipe), debug=given.debug)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """`rankgrad eval RUN`."""
    from rankgrad.recipes.run import evaluate_run

    parser = Parser("rankgrad eval", "Test a trained run again, under its data set's protocol or another one.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--split", metavar="NAME", action="append", help="what to test on; may be repeated [all test splits]")
    parser.add_argument("--checkpoint", metavar="best|last", help="which weights [best where there is one, else last]")
    parser.add_argument("--protocol", metavar="NAME", help="another protocol than the data set's own; see `rankgrad protocols`")
    _add_place(parser)
    given = parser.parse(arguments)
    if given.checkpoint not in (None, *CHECKPOINTS):
        parser.error(f"--checkpoint must be best or last, got {given.checkpoint!r}")
    evaluate_run(given.run, _place(given), splits=given.split, checkpoint=given.checkpoint, protocol=given.protocol)
    return 0


def recipes(arguments: Sequence[str]) -> int:
    """`rankgrad recipes [NAME or part of it]`."""
    parser = Parser("rankgrad recipes", "List the recipes, or show one whole.")
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="a recipe, or what the listed ones should contain")
    given = parser.parse(arguments)
    print(description(RECIPES[given.name]) if given.name in RECIPES else listing(given.name))
    return 0


def check_data(arguments: Sequence[str]) -> int:
    """`rankgrad check-data NAME DIR`."""
    from rankgrad.data.readers import READERS
    from rankgrad.data.readers import check_data as check

    parser = Parser("rankgrad check-data", "Read a data set, check it against what is published, and describe it.")
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(READERS)}")
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="where it lies")
    parser.add_argument("--partial", action="store_true", help="accept an incomplete copy, saying what is absent")
    given = parser.parse(arguments)
    print(check(given.name, given.folder, partial=given.partial))
    return 0


def protocols(arguments: Sequence[str]) -> int:
    """`rankgrad protocols`."""
    from rankgrad.eval import describe_protocols

    Parser("rankgrad protocols", "The evaluation protocols by name, each with its rule.").parse(arguments)
    print(describe_protocols())
    return 0


def plan(arguments: Sequence[str]) -> int:
    """`rankgrad plan RECIPE`."""
    from rankgrad.recipes.planning import plan_recipe

    parser = _recipe_parser("rankgrad plan", "Measure a step of a recipe on this machine: time, memory, chunk size.", arguments)
    given = parser.parse(arguments)
    if not given.recipe:
        parser.error("name the recipe to plan; `rankgrad recipes` lists them")
    print(plan_recipe(_chosen(given, changed_settings(given)), _place(given)))
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """`rankgrad sweep RECIPE --data DIR --grid lr=1e-4,3e-4 --seeds 3`."""
    from rankgrad.recipes.sweep import parse_grid
    from rankgrad.recipes.sweep import sweep as run

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
    recipe = _chosen(given, changed_settings(given))
    folder = given.out or Path("runs") / f"sweep-{recipe.name}"
    found = run(
        recipe, parse_grid(given.grid), parse_seeds(given.seeds), Shelf(_place(given)), folder, metric=given.metric
    )  # fmt: skip
    print(f"\n{found.report()}\n\nevery run: {folder / 'runs.csv'}, {folder / 'sweep.json'}")
    return 0


def study(arguments: Sequence[str]) -> int:
    """`rankgrad study omniglot --data DIR`."""
    from rankgrad.recipes.studies import STUDIES, run_study

    parser = Parser("rankgrad study", "Run the papers' ablations on one data set and print them as a table.")
    parser.add_argument("study", metavar="STUDY", help=f"one of {', '.join(STUDIES)}")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only the lines whose group or label contains this")
    parser.add_argument("--seeds", metavar="N or A,B", default="1", help="how many seeds, or which [1]")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="a line per run; a table is written beside it [in --out]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the runs [runs/study-STUDY]")
    parser.add_argument("--debug", action="store_true", help="shrink every run, to see that all of it works")
    _add_place(parser)
    add_settings(parser)
    given = parser.parse(arguments)
    if given.study not in STUDIES:
        hint = nearest(given.study, STUDIES) or f"; choose one of {', '.join(STUDIES)}"
        parser.error(f"there is no study {given.study!r}{hint}")
    chosen = STUDIES[given.study]
    base = chosen.base.with_settings(changed_settings(given))
    folder = given.out or Path("runs") / f"study-{chosen.name}{'-debug' if given.debug else ''}"
    seeds = parse_seeds(given.seeds)
    text = run_study(
        chosen, base, seeds, Shelf(_place(given)), folder, only=given.only, csv=given.csv, debug=given.debug
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
    named = next((argument for argument in arguments if argument in RECIPES), "own-images")
    add_settings(parser, RECIPES[named])
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


def _place(given: object) -> Place:
    values = vars(given)
    device = device_named(values["device"])
    cache = values["cache"] or os.environ.get("RANKGRAD_CACHE") or Path.home() / ".cache" / "rankgrad"
    if values["workers"] is not None and values["workers"] < 1:
        raise ValueError(f"--workers must be at least 1, got {values['workers']}")
    data = values["data"]
    return Place(
        data=None if data is None else data.expanduser().resolve(),
        device=device,
        cache=None if cache == "none" else Path(cache).expanduser(),
        workers=values["workers"],
        tensorboard="auto" if values.get("tensorboard") else "off",
        wandb=values.get("wandb", ""),
    )


def _chosen(given: object, changes: dict[str, object]) -> Recipe:
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
    return shrunk(recipe).with_settings(changes) if values["debug"] else recipe


def _is_csv(data: Path | None) -> bool:
    if data is None:
        return False
    return data.suffix.lower() == ".csv" or (data / "dataset.csv").is_file()


def _default_folder(recipe: Recipe) -> Path:
    return Path("runs") / recipe.name
