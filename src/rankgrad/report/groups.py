"""Which tests may be compared: those on the same data and split under the same protocol."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rankgrad.report.run_reader import Evaluation, ItemTable, Run


@dataclass(frozen=True)
class GroupMember:
    """One test of one run; `place` is the position of the run on the page, which decides its colour."""

    place: int
    run: Run
    evaluation: Evaluation
    name: str


@dataclass(frozen=True)
class EvaluationGroup:
    """Tests that may be compared, in the order of their runs."""

    members: tuple[GroupMember, ...]

    @property
    def title(self) -> str:
        """Split, data and protocol."""
        first = self.members[0].evaluation
        table = first.table.name if first.table is not None else ""
        return ", ".join(part for part in (first.split, first.data_path or table, first.protocol) if part)


def chosen_groups(runs: Sequence[Run], split: str | None) -> list[EvaluationGroup]:
    """Groups of the test of `split`, or of the main test, of every run that has one."""
    found = [(place, run, run.evaluation(split)) for place, run in enumerate(runs)]
    return group_members(GroupMember(place, run, test, run.name) for place, run, test in found if test is not None)


def all_groups(runs: Sequence[Run]) -> list[EvaluationGroup]:
    """Groups of all tests of all runs."""
    members = []
    for place, run in enumerate(runs):
        tests = sorted(run.evaluations.values(), key=lambda each: (not each.is_own, each.key != each.split))
        for test in tests:
            # other weights of the same run on the same data stand in a column of their own
            suffix = f" ({test.checkpoint})" if test.key.rpartition("@")[2] == test.checkpoint != "" else ""
            members.append(GroupMember(place, run, test, f"{run.name}{suffix}"))
    return group_members(members)


def group_members(members: Iterable[GroupMember]) -> list[EvaluationGroup]:
    """Members put together where they may be compared; the group of the first member comes first."""
    groups: list[list[GroupMember]] = []
    for member in members:
        home = next((group for group in groups if is_comparable(group[0], member)), None)
        if home is None:
            groups.append([member])
        else:
            home.append(member)
    return [EvaluationGroup(tuple(group)) for group in groups]


def is_comparable(first: GroupMember, other: GroupMember) -> bool:
    """Whether two tests are on the same data and split and under the same protocol."""
    a, b = first.evaluation, other.evaluation
    if (a.split, a.protocol) != (b.split, b.protocol):
        return False
    if a.fingerprint is not None and b.fingerprint is not None:
        return a.fingerprint == b.fingerprint
    # an older result has no fingerprint: then the tables decide, and without them the data that the runs were started on
    if a.table is not None and b.table is not None:
        return _same_items(a.table, b.table)
    return a.is_own and b.is_own and _source(first.run) == _source(other.run)


def _same_items(a: ItemTable, b: ItemTable) -> bool:
    return (
        a.paths == b.paths
        and a.labels == b.labels
        and np.array_equal(a.is_query, b.is_query)
        and np.array_equal(a.is_gallery, b.is_gallery)
    )


def _source(run: Run) -> tuple[object, object]:
    return run.settings.get("data_set"), run.recipe.get("data")
