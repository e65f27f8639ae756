"""Runs of any task: start, resume, evaluate.

A task knows its data, model, loss and metrics; everything else is here, once. A new task implements `rankgrad.runs.task.Task`
and is added to `recipes/catalogue.py`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from rankgrad.integrations.trackers import make_trackers
from rankgrad.runs.recipe import format_value
from rankgrad.runs.results_table import comparison
from rankgrad.runs.run_folder import DEBUG_NOTICE, UNTRAINED, RunFile, RunFolder
from rankgrad.runs.task import VALIDATION, SplitResult, Task
from rankgrad.runs.tester import TestedWeights, Tester, Which
from rankgrad.runs.warm_up import BatchesAfter
from rankgrad.train.journal import JOURNAL, entries, jsonable
from rankgrad.train.loop import Evaluator, fit
from rankgrad.train.processes import Processes
from rankgrad.train.resume import FitResult, is_of_another_run

# of the time of training: what a test of the untrained network may take for it to be made without being asked for
UNTRAINED_FRACTION = 0.1


def start_run(task: Task, folder: RunFolder, *, debug: bool = False) -> Mapping[str, SplitResult]:
    """Train in a new folder and test the result."""
    processes = task.context.processes
    # before the lock, which would be written into a folder of somebody else's
    processes.on_first(folder.check_free)
    with folder.training(processes):
        processes.on_first(folder.check_free)
        return _run(task, folder, resume=False, debug=debug)


def resume_run(task: Task, folder: RunFolder) -> Mapping[str, SplitResult]:
    """Continue the run in `folder` where it was stopped, and test the result. `task` is what the folder says it is."""
    processes = task.context.processes
    if folder.is_shared:
        raise ValueError(
            f"{folder} is a shared model, without the state of its training: start a new run from its weights with "
            f"--weights {folder}"
        )
    _check_data_is_there(task, folder)
    debug = folder.read().debug
    with folder.training(processes):
        return _run(task, folder, resume=True, debug=debug)


def _run(task: Task, folder: RunFolder, *, resume: bool, debug: bool) -> Mapping[str, SplitResult]:
    model, outcome = _train(task, folder, resume=resume, debug=debug, tests_untrained=True)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    which: Which = "best" if outcome.best else "last"
    if which == "best":
        folder.checkpoints.checkpoint(which).load_into(model)
    task.context.say(f"testing the {which} checkpoint of {folder}")
    step = outcome.best["step"] if outcome.best else outcome.step
    return _test(task, model, folder, TestedWeights(which, step), debug=debug)


def evaluate_run(
    task: Task,
    folder: RunFolder,
    *,
    splits: Sequence[str] | None = None,
    checkpoint: Which | None = None,
    protocol: str | None = None,
) -> Mapping[str, SplitResult]:
    """Test a checkpoint of the run in `folder` again.

    Args:
        task: what the folder says it is, perhaps with other data.
        folder: of the run.
        splits: what to test on, by default all test splits.
        checkpoint: "best", "last", or "untrained" for the weights that training began with; by default the best where there
            is one, else the last.
        protocol: other rules than those of the data set.
    """
    _check_data_is_there(task, folder)
    saved_file = folder.read()
    settings = task.recipe.settings()
    changed = [
        f"{name}={format_value(value)}"
        for name, value in settings.items()
        if saved_file.settings.get(name, value) != value and name not in task.recipe.locations
    ]
    default = folder.default_checkpoint
    which = checkpoint or default
    if which == "untrained":
        model = task.make_model(pretrained=True)
        task.initialise(model)
        found = TestedWeights(which, 0, (UNTRAINED, *changed))
        task.context.say(f"testing the untrained network of {folder}")
    else:
        saved = folder.checkpoint(which)
        # all weights come from the checkpoint: the file or download that training began with is not needed
        model = task.make_model(pretrained=False)
        saved.load_into(model)
        found = TestedWeights(which, saved.step, (*([which] if which != default else []), *changed))
        task.context.say(f"testing the {which} checkpoint of {folder}, step {saved.step:,}")
    return _test(task, model, folder, found, splits=splits, protocol=protocol, debug=saved_file.debug)


@dataclass(frozen=True)
class TrialResult:
    """What a run of a sweep or study gave.

    Attributes:
        metrics: of the last weights, by split.
        seconds: what training and tests took.
        intervals: 95% confidence intervals of the metrics, by test split.
        curves: by test split that was watched, (epoch, metrics) at every evaluation.
    """

    metrics: Mapping[str, Mapping[str, float]]
    seconds: float
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]] = field(default_factory=dict)


def _check_data_is_there(task: Task, folder: RunFolder) -> None:
    """Refuse data that the folder names and that has moved since."""
    data = task.context.data
    if data is not None and data == folder.read().data and not data.exists():
        raise FileNotFoundError(f"the data of {folder} is no longer in {data}: say where it is with --data DIR")
    if not task.has_data:
        raise ValueError(f"{folder} does not say where its data is: name it with --data DIR")


def train_and_evaluate(
    task: Task,
    folder: RunFolder,
    *,
    splits: Sequence[str],
    save: bool = False,
    watch: bool = False,
    checkpoints: bool = True,
    debug: bool = False,
) -> TrialResult:
    """Train, or continue training, in `folder`, and test the last weights. Used by sweeps and studies.

    Args:
        task: what to train.
        folder: where.
        splits: what to test on; "validation" are the classes that the recipe sets aside.
        save: write the results to the folder.
        watch: test while training too, every `evaluate_every` epochs. Nothing is selected by it.
        checkpoints: False writes none: a run that is stopped starts again.
        debug: the run is a shrunk one.
    """
    began = time.perf_counter()
    tests = [split for split in splits if split != VALIDATION]
    watchers = {split: _Watcher(task, split, folder) for split in tests if watch}
    with folder.training(task.context.processes):
        resume = checkpoints and folder.is_begun
        model, outcome = _train(task, folder, resume=resume, debug=debug, watchers=watchers, checkpoints=checkpoints)
        if outcome.reason == "interrupted":
            raise KeyboardInterrupt
        metrics = {split: dict(outcome.metrics[VALIDATION]) for split in splits if split == VALIDATION}
        tester = Tester(task, model, folder, TestedWeights("last", outcome.step), debug=debug, is_saved=save)
        results: dict[str, SplitResult] = {}
        with folder.evaluating(task.context.processes):
            for split in tests:
                watched = watchers[split].result if split in watchers else None
                # the last evaluation of training is that of the last weights
                results[split] = watched if watched and not save else tester.test(split)
        tester.raise_problems()
    metrics |= {split: dict(result.metrics) for split, result in results.items()}
    intervals = {split: dict(result.intervals()) for split, result in results.items()}
    return TrialResult(metrics, time.perf_counter() - began, intervals, {split: _curve(folder, split) for split in watchers})


class _Watcher:
    """Tests on a split while training, and has the last result."""

    def __init__(self, task: Task, split: str, folder: RunFolder) -> None:
        self.task, self.split, self.folder = task, split, folder
        self.result: SplitResult | None = None

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        self.result = self.task.make_evaluator(model)(self.split, protocol=None, scratch=self.folder.path)
        return self.result.metrics


def _curve(folder: RunFolder, split: str) -> list[tuple[int, Mapping[str, float]]]:
    found = (entry for entry in entries(folder.path / JOURNAL) if entry["kind"] == "eval" and entry["split"] == split)
    # a run that was started again has written some of them twice
    return list({int(entry["epoch"]): entry["metrics"] for entry in found}.items())


def _train(
    task: Task,
    folder: RunFolder,
    *,
    resume: bool,
    debug: bool,
    tests_untrained: bool = False,
    watchers: Mapping[str, Evaluator] | None = None,
    checkpoints: bool = True,
) -> tuple[nn.Module, FitResult]:
    context, recipe = task.context, task.recipe
    for note in task.notes():
        context.note(note)
    begun = context.processes.on_first(lambda: resume and folder.is_begun)
    if resume and not begun:
        context.processes.on_first(folder.remove_untrained_checkpoint)
    _check_data(task, folder, begun=begun)
    waits = task.warm_up()
    batches = task.make_batches() if waits is None else BatchesAfter(task.make_batches(), waits)
    # a checkpoint has all weights: the file or download that training began with is not needed again
    model = task.make_model(pretrained=not begun)
    if not begun:
        task.initialise(model)
    content = RunFile.of(task.name, recipe, context.data, debug=debug, entries=task.run_file_entries())
    loss = task.make_loss()
    with folder.recorded(content, context.processes):
        if not recipe.trains:
            return model, _save_untrained(model, folder, context.processes)
        if tests_untrained and not begun and _is_cheap(task, len(batches)):
            context.say("testing the untrained network, to compare with")
            _test_splits(task, model, folder, TestedWeights("untrained", 0, (UNTRAINED,)), debug=debug)
        outcome = fit(
            model,
            loss,
            batches,
            recipe.train_settings(parallel=context.parallel),
            folder.path,
            param_groups=task.param_groups(model, loss),
            evaluators={**task.evaluators(), **(watchers or {})},
            select=task.selected_on(),
            device=context.device,
            resume=resume,
            identity=recipe.identity(),
            identity_defaults=recipe.before_setting,
            description={"recipe": recipe.name, "task": task.name, "data": task.data_counts()},
            trackers=make_trackers(
                folder.path,
                tensorboard=context.tensorboard,
                wandb=context.wandb,
                trackio=context.trackio,
                mlflow=context.mlflow,
            ),
            resume_hint=f"Continue with: {task.command} --resume {folder}",
            processes=context.processes,
            checkpoints=checkpoints,
        )
    return model, outcome


def _save_untrained(model: nn.Module, folder: RunFolder, processes: Processes) -> FitResult:
    """The result of a run of 0 epochs: a checkpoint of the first weights, from which nothing is resumed."""
    began = time.perf_counter()
    store = folder.checkpoints

    def save() -> Path:
        store.prepare()
        return store.save(model, {}, step=0, epoch=0, metrics={}).folder

    return FitResult("finished", 0, 0, {}, None, processes.on_first(save), time.perf_counter() - began)


def _is_cheap(task: Task, steps_per_epoch: int) -> bool:
    """Whether a test of the untrained network takes little of the time that training will."""
    if not task.untrained_is_baseline:
        return False
    splits = task.data_identity()
    tests = task.test_splits()
    if not all(split in splits for split in tests):
        return False
    steps = task.recipe.train_settings().total_steps(steps_per_epoch)
    batch = task.recipe.batch_size or splits["train"].items / steps_per_epoch
    # a training image goes forward and backward, three times the work of a test image
    return bool(sum(splits[split].items for split in tests) <= UNTRAINED_FRACTION * 3 * steps * batch)


def _check_data(task: Task, folder: RunFolder, *, begun: bool) -> None:
    """Refuse to resume on other data than the run was started on; save what it is started on."""
    if begun and task.context.processes.on_first(lambda: _is_of_another_run(task, folder)):
        # the training loop refuses to resume and names the settings; these may be why the data differs
        return
    now = task.data_identity()
    before = task.context.processes.on_first(folder.read_data_identity) if begun else None
    if before is not None:
        changes = {
            split: before[split].changes(found) for split, found in now.items() if split in before
        }  # fmt: skip
        found = [f"{split}: {'; '.join(phrases)}" for split, phrases in changes.items() if phrases]
        if found:
            raise ValueError(
                f"the data has changed since {folder} was started ({'. '.join(found)}): restore it, or start a new run "
                "in another folder (--out DIR)"
            )
        return
    if begun:
        task.context.note(
            f"{folder} was saved without fingerprints of its data, so it cannot be checked that the data is the same"
        )
    task.context.processes.on_first(lambda: folder.write_data_identity(now))


def _is_of_another_run(task: Task, folder: RunFolder) -> bool:
    """Whether the training loop will refuse the settings with which the run is to be resumed."""
    recipe = task.recipe
    if folder.read_recipe(type(recipe)).identity() == recipe.identity():
        return False
    # a process that was killed may have left other settings in recipe.json than those of its checkpoint
    checkpoint, _ = folder.checkpoints.newest_good()
    return checkpoint is not None and is_of_another_run(checkpoint, jsonable(recipe.identity()), recipe.before_setting)


def _test(
    task: Task,
    model: nn.Module,
    folder: RunFolder,
    checkpoint: TestedWeights,
    *,
    splits: Sequence[str] | None = None,
    protocol: str | None = None,
    debug: bool = False,
) -> Mapping[str, SplitResult]:
    """Test on every split, save each result and print all of them beside what is published."""
    known = task.test_splits()
    for split in splits or ():
        if split not in known:
            raise ValueError(f"{task.recipe.name} cannot be tested on {split!r}: choose one of {', '.join(known)}")
    tester = Tester(task, model, folder, checkpoint, protocol=protocol, debug=debug)
    with folder.evaluating(task.context.processes):
        results = {split: tester.test(split) for split in splits or known}
    if task.context.processes.first:
        _print_results(task, results, tester.untrained, debug=debug)
    tester.raise_problems()
    return results


def _test_splits(task: Task, model: nn.Module, folder: RunFolder, weights: TestedWeights, *, debug: bool) -> None:
    """Test on every split and save the results, without a word."""
    tester = Tester(task, model, folder, weights, debug=debug)
    with folder.evaluating(task.context.processes):
        for split in task.test_splits():
            tester.test(split)
    tester.raise_problems()


def _print_results(
    task: Task, results: Mapping[str, SplitResult], untrained: Mapping[str, Mapping[str, float]], *, debug: bool
) -> None:
    for evaluation in results.values():
        if evaluation.details:
            print(f"\n{evaluation.details}")
    published = () if debug else task.published()
    print(f"\n{comparison(results, published, task.combine(results), untrained)}")
    if debug:
        print(f"\n{DEBUG_NOTICE}")
    elif any(number.split in results for number in published):
        print("\ndifference: in percentage points. Published numbers hold for the paper's own data, weights and settings.")
