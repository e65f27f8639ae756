"""The runs of a sweep or study: each is trained once, and what is finished is read from the ledger."""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rankgrad.runs.ledger import Entry, Ledger, key_of
from rankgrad.runs.pipeline import TrialResult, train_and_evaluate
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import VALIDATION, Task
from rankgrad.train.errors import NotFiniteError, TrainingError


class NotStartedError(Exception):
    """A run was not started: it would go beyond the time that was given, or is another process's."""


class Trials:
    """Runs in a folder with a ledger.

    Args:
        folder: of the ledger and the runs.
        checkpoints: "all" keeps those of every run, "unfinished" those of a run that was stopped, so that it is resumed; with
            "none" it starts again.
        save: keep the results of each run.
        minutes: no run is started that would take longer than this in all, as far as the runs before it tell; 0 for no limit.
        debug: the runs are shrunk ones.

    Attributes:
        starts: whether runs that are not in the ledger are started.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoints: Literal["all", "unfinished", "none"],
        save: bool = False,
        minutes: float = 0.0,
        debug: bool = False,
    ) -> None:
        self.folder, self.checkpoints, self.save, self.debug = folder, checkpoints, save, debug
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.minutes, self._began = minutes, time.perf_counter()
        self.starts = True
        # by kind of run, what the last one took
        self._seconds: dict[tuple[str, ...], float] = {}

    def run(
        self,
        task: Task,
        splits: Sequence[str],
        title: str,
        *,
        group: str,
        label: str,
        changes: Mapping[str, Any],
        name: str = "",
        watched_metrics: Sequence[str] = (),
    ) -> list[Entry]:
        """The entries of a run, one for each split, from the ledger or from training.

        Args:
            task: what to train.
            splits: what to test on.
            title: printed before a run.
            group: of the entries.
            label: of the entries.
            changes: of the entries.
            name: of the run's folder, by default its key.
            watched_metrics: metrics to save over the course of training, with their intervals at the end; () for none.
        """
        recipe = task.recipe
        keys = {split: key_of(recipe, split, _data_of(task, split)) for split in splits}
        older = RunFolder(self.folder / "runs" / (name or key_of(recipe, splits[0])))
        known = [self.ledger.get(key) or self._older_entry(task, split, older) for split, key in keys.items()]
        if all(known):
            # the same settings may stand in several groups
            return [replace(entry, group=group, label=label, changes=dict(changes)) for entry in known if entry]
        kind = tuple(splits)
        self._check_time(kind)
        print(f"{title}, seed {recipe.seed}", flush=True)
        run = RunFolder(self.folder / "runs" / (name or keys[splits[0]]))
        problem = ""
        try:
            result = train_and_evaluate(
                task,
                run,
                splits=splits,
                save=self.save,
                watch=bool(watched_metrics),
                checkpoints=self.checkpoints != "none",
                debug=self.debug,
            )
        except TrainingError as error:
            # a setting with which training diverges is a result; anything else stops the study
            if not isinstance(error.__cause__, NotFiniteError):
                raise
            problem = error.__cause__.fact
            print(f"diverged: {problem}", flush=True)
            result = TrialResult({split: {} for split in splits}, 0.0)
        self._seconds[kind] = result.seconds
        entries = []
        for split in splits:
            intervals = result.intervals.get(split, {})
            entry = Entry(
                keys[split],
                group,
                label,
                dict(changes),
                recipe.seed,
                split,
                result.metrics[split],
                result.seconds,
                {metric: intervals[metric] for metric in watched_metrics if metric in intervals},
                [
                    {"epoch": epoch, **{metric: metrics[metric] for metric in watched_metrics}}
                    for epoch, metrics in result.curves.get(split, ())
                ],
                problem,
            )
            self.ledger.add(entry)
            entries.append(entry)
        if self.checkpoints != "all":
            # results and curves are kept; the weights of all runs would fill a disk
            shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
        return entries

    def _older_entry(self, task: Task, split: str, run: RunFolder) -> Entry | None:
        """What the ledger has from before data was part of its keys; it counts unless the folder of its run says otherwise."""
        entry = self.ledger.get(key_of(task.recipe, split))
        if entry is None:
            return None
        before, now = run.read_data_identity(), task.data_identity()
        if before is None:
            task.context.note(
                f"{self.ledger.path} has results that were saved without fingerprints of their data, so it cannot be checked "
                "that the data is the same"
            )
            return entry
        return entry if all(before[name] == found for name, found in now.items() if name in before) else None

    def _check_time(self, kind: tuple[str, ...]) -> None:
        used = time.perf_counter() - self._began
        if not self.starts:
            raise NotStartedError
        if self.minutes and used + self._seconds.get(kind, 0.0) > 60 * self.minutes:
            raise NotStartedError


def _data_of(task: Task, split: str) -> str:
    """Digest of the data that a result on a split depends on: two data sets may be trained with the same settings."""
    found = {name: identity.fingerprint for name, identity in task.data_identity().items()}
    if split not in (VALIDATION, *found):
        # a split of another data set than the one that trains
        found[split] = task.test_identity(split).data
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
