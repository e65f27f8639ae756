"""What the package declares: versions, extras, contents."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lower_bounds(requirements: list[str]) -> dict[str, str]:
    return dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in requirements)


def padded(version: str) -> tuple[int, ...]:
    return tuple(map(int, (*version.split("."), "0", "0")[:3]))


def test_the_lowest_versions_that_are_tested_are_those_that_are_declared(project):
    extras = project["optional-dependencies"]
    declared = lower_bounds([*project["dependencies"], *extras["glyphs"], *extras["train"]])
    lines = (ROOT / "tests" / "lowest-versions.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: padded(bound) for name, bound in tested.items()} == {name: padded(bound) for name, bound in declared.items()}


@pytest.mark.skipif(sys.platform == "win32", reason="a Makefile")
def test_every_target_of_the_makefile_is_in_its_help():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split()
    told = re.findall(r'@echo "make ([\w-]+) ', text)
    assert set(targets) - {"help"} == set(told)
