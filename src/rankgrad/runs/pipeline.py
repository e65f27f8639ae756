"""A recipe from beginning to end: data, training, tests, and the table of what was reached beside what is published."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

import rankgrad as rg
from rankgrad.eval import Result
from rankgrad.integrations.trackers import make_trackers
from rankgrad.models import Embedder
from rankgrad.runs.data_cache import DataCache, RunContext, Split
from rankgrad.runs.retrieval_evaluation import RetrievalEvaluator, comparison, embeddings_of, save, score_shares
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import make_batches
from rankgrad.runs.run_folder import DEBUG_NOTICE, RECIPE_FILE, RunFolder, content_of, data_in, description_in, read
from rankgrad.runs.task_losses import make_loss
from rankgrad.runs.task_models import groups_of, make_model, whiten
from rankgrad.train.checkpoints import UNFINISHED
from rankgrad.train.loop import Evaluator, FitResult, fit

DEBUG_FILE = "DEBUG.txt"
VALIDATION = "validation"


def start_run(recipe: Recipe, data: DataCache, folder: Path, *, debug: bool = False) -> Mapping[str, Result]:
    """Train `recipe` in a new folder and test it."""
    if data.context.processes.on_first(lambda: folder.exists() and not _is_free(folder)):
        way = f"continue the run in it with --resume {folder}, or " if (folder / RECIPE_FILE).is_file() else ""
        raise ValueError(f"{folder} is there already and not empty: {way}give another folder with --out")
    return _run(recipe, data, folder, resume=False, debug=debug)


def _is_free(folder: Path) -> bool:
    """Whether a run may begin in `folder`: it is empty, or a run ended there before its first step."""
    if not folder.is_dir():
        return False
    checkpoints = RunFolder(folder).checkpoints.path
    before_the_first_step = {RECIPE_FILE, DEBUG_FILE, checkpoints.name}
    # what a run that was killed in writing leaves behind is swept away by the next one
    found = {path.name for path in (*folder.iterdir(), *checkpoints.glob("*")) if not path.name.startswith(UNFINISHED)}
    return found <= before_the_first_step


def resume_run(folder: Path, context: RunContext, changes: Mapping[str, Any]) -> int:
    """Go on with the run in `folder` where it was stopped, from what the folder says and nothing else."""
    saved = load_run(folder)
    recipe = saved.recipe.with_settings(changes)
    _run(recipe, DataCache(replace(context, data=context.data or saved.data)), folder, resume=True, debug=saved.debug)
    return 0


def _run(recipe: Recipe, data: DataCache, folder: Path, *, resume: bool, debug: bool) -> Mapping[str, Result]:
    for note in data.data_set(recipe).notes:
        data.context.say(f"note: {note}")
    model, outcome = train(recipe, data, folder, resume=resume, debug=debug)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    which: Literal["best", "last"] = "best" if outcome.best else "last"
    if which == "best":
        RunFolder(folder).checkpoints.checkpoint(which).load_into(model)
    data.context.say(f"testing the {which} checkpoint of {folder}")
    return examine(recipe, data, model, folder, debug=debug)


def train(recipe: Recipe, data: DataCache, folder: Path, *, resume: bool, debug: bool = False) -> tuple[Embedder, FitResult]:
    """The network of `recipe`, trained; the run's files are in `folder`."""
    context = data.context
    device = context.device
    split, validation = data.training(recipe)
    batches = make_batches(recipe, split, data.context)
    run = RunFolder(folder)
    processes = data.context.processes
    begun = processes.on_first(lambda: resume and run.checkpoints.pointer("last") is not None)
    # a checkpoint has all weights: the file or download that training began with is not needed again
    model = make_model(replace(recipe, weights="none") if begun else recipe, device)
    if recipe.whiten and not begun:
        for remark in whiten(recipe, model, split, data.context):
            data.context.say(f"note: {remark}")
    evaluators = _evaluators(recipe, data, validation)
    processes.on_first(run.prepare)
    loss = make_loss(recipe)
    with _saved(recipe, data.context, folder, debug=debug):
        outcome = fit(
            model,
            rg.DistributedRankLoss(loss) if processes.size > 1 else loss,
            batches,
            recipe.train_settings(parallel=context.parallel),
            folder,
            param_groups=groups_of(recipe, model),
            evaluators=evaluators,
            select=next(iter(evaluators), None),
            device=device,
            resume=resume,
            identity=recipe.identity(),
            description={"recipe": recipe.name, "data": _counts(split, validation)},
            trackers=make_trackers(folder, tensorboard=context.tensorboard, wandb=context.wandb),
            resume_hint=f"Continue with: rankgrad train --resume {folder}",
            processes=processes,
        )
    return model, outcome


@contextlib.contextmanager
def _saved(recipe: Recipe, context: RunContext, folder: Path, *, debug: bool) -> Iterator[None]:
    """Write RUN/recipe.json; settings with which the run is refused leave the file as it was."""
    path = folder / RECIPE_FILE
    before = path.read_bytes() if path.is_file() else None
    context.processes.on_first(lambda: save_run(recipe, context, folder, debug=debug))
    try:
        yield
    except ValueError:
        if before is not None and context.processes.first:
            RunFolder(folder).write_json(RECIPE_FILE, json.loads(before))
        raise


def train_and_evaluate(
    recipe: Recipe, data: DataCache, folder: Path, *, splits: Sequence[str]
) -> tuple[dict[str, dict[str, float]], float]:
    """Train, or go on training, in `folder`; what the last weights score on `splits`, and the seconds it took.

    "validation" is scored by the classes that the recipe sets aside for it.
    """
    began = time.perf_counter()
    model, outcome = train(recipe, data, folder, resume=RunFolder(folder).checkpoints.pointer("last") is not None)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    scores = {split: dict(outcome.metrics[VALIDATION]) for split in splits if split == VALIDATION}
    tester = RetrievalEvaluator(recipe, data, model, folder)
    for split in splits:
        if split != VALIDATION:
            scores[split] = dict(tester.score(split).result or {})
    return scores, time.perf_counter() - began


def evaluate_run(
    folder: Path,
    context: RunContext,
    *,
    splits: Sequence[str] | None = None,
    checkpoint: str | None = None,
    protocol: str | None = None,
) -> Mapping[str, Result]:
    """Test a checkpoint of the run in `folder` again."""
    saved = load_run(folder)
    data = DataCache(replace(context, data=context.data or saved.data))
    run = RunFolder(folder)
    which: Literal["best", "last"] = (
        "last" if checkpoint == "last" or (checkpoint is None and not run.checkpoints.pointer("best")) else "best"
    )
    found = run.checkpoints.checkpoint(which)
    # all weights come from the checkpoint: the file or download that training began with is not needed
    model = make_model(replace(saved.recipe, weights="none"), context.device)
    found.load_into(model)
    context.say(f"testing the {which} checkpoint of {folder}, step {found.step:,}")
    return examine(saved.recipe, data, model, folder, splits=splits, protocol=protocol, debug=saved.debug)


def examine(
    recipe: Recipe,
    data: DataCache,
    model: Embedder,
    folder: Path,
    *,
    splits: Sequence[str] | None = None,
    protocol: str | None = None,
    debug: bool = False,
) -> Mapping[str, Result]:
    """Score the test splits, write RUN/eval and print the comparison with what is published."""
    known = data.tests(recipe)
    for split in splits or ():
        if split not in known:
            raise ValueError(f"{recipe.name} cannot be tested on {split!r}: there is {', '.join(known)}")
    results = {}
    tester = RetrievalEvaluator(recipe, data, model, folder, announce=True)
    for split in splits or known:
        tested = tester.score(split, protocol=protocol)
        save(tested, folder, data.context.processes, debug=debug)
        if tested.result is not None:
            results[split] = tested.result
    if data.context.processes.first:
        _print_results(recipe, results, debug=debug)
    return results


def _print_results(recipe: Recipe, results: Mapping[str, Result], *, debug: bool) -> None:
    print(f"\n{comparison(results, () if debug else recipe.published)}")
    if debug:
        print(f"\n{DEBUG_NOTICE}")
    elif any(number.split in results for number in recipe.published):
        print("\ndifference: points of percent. A published number holds for the paper's own data, weights and settings.")


def _evaluators(recipe: Recipe, data: DataCache, validation: Split | None) -> dict[str, Evaluator]:
    """What chooses the best checkpoint while training goes on."""
    if validation is not None:
        ks = data.data_set(recipe).ks

        def on_validation(model: nn.Module) -> Mapping[str, float]:
            embeddings = embeddings_of(recipe, _embedder(model), validation, data.context)
            return dict(score_shares(embeddings, validation.selected, data.context, ks=ks) or {})

        return {VALIDATION: on_validation}
    if recipe.validation != "test":
        return {}
    split = next(iter(data.tests(recipe)))
    return {split: lambda model: dict(RetrievalEvaluator(recipe, data, _embedder(model)).score(split).result or {})}


def _embedder(model: nn.Module) -> Embedder:
    assert isinstance(model, Embedder)
    return model


def _counts(split: Split, validation: Split | None) -> dict[str, dict[str, int]]:
    parts = {"train": split, **({VALIDATION: validation} if validation else {})}
    return {name: {"images": len(found.labels), "classes": found.selected.num_classes} for name, found in parts.items()}


def save_run(recipe: Recipe, context: RunContext, folder: Path, *, debug: bool) -> None:
    """RUN/recipe.json: all that is needed to continue or test the run, and the published numbers."""
    RunFolder(folder).write_json(RECIPE_FILE, content_of(recipe, context.data, debug=debug))
    if debug:
        (folder / DEBUG_FILE).write_text(f"{DEBUG_NOTICE}\n", encoding="utf-8")


class SavedRun:
    """What RUN/recipe.json says."""

    def __init__(self, recipe: Recipe, data: Path | None, *, debug: bool) -> None:
        self.recipe, self.data, self.debug = recipe, data, debug


def load_run(folder: Path) -> SavedRun:
    """The recipe that the run in `folder` is of."""

    def made(content: Mapping[str, Any]) -> SavedRun:
        recipe = Recipe(**description_in(content)).with_settings(content["settings"])
        return SavedRun(recipe, data_in(content), debug=bool(content.get("debug")))

    return read(folder, made)
