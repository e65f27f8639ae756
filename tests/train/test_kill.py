"""A run killed with SIGKILL at any point and resumed ends as one that never was, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_script.py")


@pytest.fixture(scope="module")
def fates(tmp_path_factory):
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_life_but_the_last_was_killed(fates):
    sure = {name: fate for name, fate in fates.items() if not name.endswith("of the time")}
    assert len(sure) >= 25
    assert {death for fate in sure.values() for death in fate["deaths"]} == {-9}
    assert all(fate["exit"] == 0 for fate in fates.values())


def test_the_weights_are_the_same_bit_for_bit(fates):
    assert {name for name, fate in fates.items() if fate["weights"] != fates["never"]["weights"]} == set()


def test_last_and_best_are_the_same(fates):
    never = fates["never"]["pointers"]
    assert never["last"]["step"] == 15
    assert never["best"]["metrics"]["margin"] > 0
    assert {name for name, fate in fates.items() if fate["pointers"] != never} == set()


def test_the_journal_tells_one_story(fates):
    never = fates["never"]["losses"]
    assert [step for step, _ in never] == list(range(1, 16))
    assert len({loss for _, loss in never}) == 15
    assert {name for name, fate in fates.items() if fate["losses"] != never} == set()


def test_nothing_is_left_behind(fates):
    assert {name for name, fate in fates.items() if fate["folders"] != fates["never"]["folders"]} == set()
