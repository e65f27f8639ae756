"""Tests of a run's weights on its splits, each result saved under a key of its own."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from torch import nn

from rankgrad._files import atomic_folder, write_error_reason
from rankgrad.runs.run_folder import UNTRAINED, RunFolder
from rankgrad.runs.task import SplitResult, Task, TestIdentity
from rankgrad.train.errors import TrainingError

Which: TypeAlias = Literal["best", "last", "untrained"]


@dataclass(frozen=True)
class TestedWeights:
    """The weights that are tested. `marks` are those of a result that is not the run's own: other weights, other settings."""

    __test__ = False  # not a test, whatever pytest makes of the name

    which: Which
    step: int
    marks: tuple[str, ...] = ()


class Tester:
    """Tests on one split after another and saves the results, each under a key of its own.

    The key of the run's own tests is the name of the split. Other data, another protocol or another checkpoint is added to it,
    so that no result replaces one that is not comparable.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        folder: RunFolder,
        weights: TestedWeights,
        *,
        protocol: str | None = None,
        debug: bool = False,
        is_saved: bool = True,
    ) -> None:
        self.task, self.folder, self.weights, self.protocol = task, folder, weights, protocol
        self.debug, self.is_saved = debug, is_saved
        self.evaluate = task.make_evaluator(model)
        self.problems: list[str] = []
        self.untrained: dict[str, Mapping[str, float]] = {}
        """Metrics of the untrained network on the same splits, as far as there are any."""

    def test(self, split: str) -> SplitResult:
        """Test and save. What cannot be saved is a problem for `raise_problems`, when the result has been printed."""
        identity = self.task.test_identity(split, self.protocol)
        is_own = self._is_own(split, identity)
        key = self.key_of(split, identity, is_own=is_own, marks=self.weights.marks)
        data = self.task.context.data
        extra = {
            "data": {"path": None if data is None else str(data), "fingerprint": identity.data, "own": is_own},
            "checkpoint": {"name": self.weights.which, "step": self.weights.step},
            "debug": self.debug,
        }
        evaluation: SplitResult | None = None
        try:
            with self._output(key) as (folder, is_kept):
                evaluation = self.evaluate(split, protocol=self.protocol, scratch=folder)
                if is_kept:
                    evaluation.write(folder, extra)
        except OSError as error:
            if evaluation is None or self.task.context.processes.size > 1:
                raise
            self._add_problem(key, error)
        else:
            self.untrained[split] = self._read_untrained(split, identity, is_own=is_own)
            if is_kept and key != split:
                self.task.context.say(f"{split}: saved as {self.folder.result(key)}")
        return evaluation

    def key_of(self, split: str, identity: TestIdentity, *, is_own: bool, marks: Sequence[str]) -> str:
        """Name of the result's folder."""
        data = "" if is_own else f"{_name_of(self.task.context.data)}-{identity.data[:8]}"
        protocol = "" if identity.is_default else identity.protocol
        return "@".join(filter(None, (split, data, protocol, *marks))).replace("/", "_")

    def raise_problems(self) -> None:
        """Say what could not be saved."""
        if self.problems:
            raise TrainingError(f"the result could not be saved: {'; '.join(self.problems)}")

    def _read_untrained(self, split: str, identity: TestIdentity, *, is_own: bool) -> Mapping[str, float]:
        marks = [UNTRAINED, *(mark for mark in self.weights.marks if "=" in mark)]
        path = self.folder.result(self.key_of(split, identity, is_own=is_own, marks=marks)) / "result.json"
        if self.weights.which == UNTRAINED or not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            is_same = content["data"]["fingerprint"] == identity.data
            return {str(name): float(value) for name, value in content["metrics"].items()} if is_same else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _is_own(self, split: str, identity: TestIdentity) -> bool:
        """Whether the data is what the run was started on; without fingerprints, whether it is in the same place."""

        def compare() -> bool:
            saved = (self.folder.read_data_identity() or {}).get(split)
            return identity.data == saved.fingerprint if saved else self.task.context.data == self.folder.read().data

        return self.task.context.processes.on_first(compare)

    @contextlib.contextmanager
    def _output(self, key: str) -> Iterator[tuple[Path, bool]]:
        """A folder to write to, and whether it is kept as the result; the processes agree on that."""
        processes = self.task.context.processes
        with contextlib.ExitStack() as stack:
            path: Path | None = None
            if self.is_saved and processes.first:
                try:
                    path = stack.enter_context(atomic_folder(self.folder.result(key), replace=True))
                except OSError as error:
                    self._add_problem(key, error)
            is_kept = processes.on_first(lambda: path is not None)
            yield path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankgrad-"))), is_kept

    def _add_problem(self, key: str, error: OSError) -> None:
        self.problems.append(f"{self.folder.result(key)}: {write_error_reason(error)}")


def _name_of(data: Path | None) -> str:
    # file systems allow 255 bytes in all
    return "data" if data is None else data.stem.encode()[:60].decode(errors="ignore")
