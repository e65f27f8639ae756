"""A few real kills, and proof that a run which lost something would be noticed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.trials.kill_rank_trials import RANK_KILL_POINTS, KillRankTrials
from benchmarks.trials.run_lifecycle import Observer, complaints_after_kill, differences, outcome

from rankgrad.train.checkpoints import WEIGHTS, CheckpointStore

ROOT = Path(__file__).parents[2]


def trial(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_killed_runs_end_like_the_one_that_never_was():
    done = trial("benchmarks.trials.kill", "--trials", "3", "--seed", "5", "--forked", "--variant", "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 kills in \d+ runs, .* 0 runs lost something", done.stdout, re.MULTILINE)
    assert re.search(r"^all +3 +0 +0 +3$", done.stdout, re.MULTILINE)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for ranks in /proc")
def test_a_killed_rank_ends_its_job_and_the_run_goes_on():
    points = ("--kill-point", "decode", "--kill-point", "evaluation")
    done = trial("benchmarks.trials.kill", "--processes", "2", "--trials", "2", "--seed", "3", "--variant", "schedule", *points)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^decoding images +0 +0 +1 +1$", done.stdout, re.MULTILINE)
    assert re.search(r"^2 kills in 1 runs, .* 0 came after the end; 0 runs lost something", done.stdout, re.MULTILINE)


@pytest.fixture
def run(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.prepare()
    model = torch.nn.Linear(2, 2)
    for step in (3, 6):
        store.save(model, {"step": step}, step=step, epoch=1, metrics={})
    entry = {"kind": "step", "step": 6, "epoch": 1, "loss": 0.5, "gradient": 1.0}
    (store.path.parent / "journal.jsonl").write_text(json.dumps(entry) + "\n")
    return store.path.parent


def test_a_good_folder_has_no_complaints(run):
    observer = Observer(run)
    observer.update()
    assert observer.named == 6
    assert complaints_after_kill(observer) == []


def test_a_lost_and_a_damaged_checkpoint_are_noticed(run):
    observer = Observer(run)
    observer.update()
    weights = run / "checkpoints" / "step-00000006" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    assert re.search("damaged: step-00000006: weights.safetensors has", complaints_after_kill(observer)[0])
    assert "what is left is of step 3" in complaints_after_kill(observer)[1]
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    assert "holds no readable checkpoint" in complaints_after_kill(observer)[0]


@pytest.mark.parametrize("what", ["losses", "a file", "a file too many"])
def test_a_run_that_diverged_is_noticed(run, what):
    before = outcome(run)
    assert differences(outcome(run), before) == []
    if what == "losses":
        (run / "journal.jsonl").write_text((run / "journal.jsonl").read_text().replace("0.5", "0.5000001"))
        assert differences(outcome(run), before) == ["losses is not the same"]
    elif what == "a file":
        weights = run / "checkpoints" / "step-00000003" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
        assert differences(outcome(run), before) == [f"checkpoints/step-00000003/{WEIGHTS} is not the same"]
    else:
        (run / "checkpoints" / ".writing-x").write_text("")
        assert differences(outcome(run), before) == ["checkpoints/.writing-x is not the same"]


@pytest.fixture
def changed(run, tmp_path):
    """KillTrials whose run was begun by two processes, killed after step 3 and ended by one."""
    trials = KillRankTrials(tmp_path, 0, kill_points=RANK_KILL_POINTS, processes=2)
    evaluation = {"kind": "eval", "step": 6, "epoch": 1, "metrics": {"R@1": 0.5}}
    steps = [{"kind": "step", "step": step, "epoch": 1, "loss": 0.5, "gradient": 1.0} for step in range(1, 7)]
    begun = {"kind": "start", "step": 0, "epoch": 1, "processes": 2}
    tested = run / "eval" / "test"
    tested.mkdir(parents=True)
    (tested / "result.json").write_text(json.dumps({"metrics": {"R@1": 0.5}}))
    write_journal(run, [begun, *steps, evaluation])
    shutil.copytree(run, trials.reference_folder("memory"))
    trials.references["memory"] = outcome(run)
    write_journal(run, [begun, *steps[:3], {**begun, "kind": "resume", "step": 3, "processes": 1}, *steps[3:], evaluation])
    return trials


def write_journal(folder, content):
    (folder / "journal.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in content))


@pytest.mark.parametrize(
    ("step", "loss", "complaint"),
    [
        (3, 0.5000001, "the loss of step 3 is not the same"),
        (4, 0.500001, None),
        (4, 0.50001, "the loss of step 4 is 2.0e-05 from that of 2 processes"),
        (5, 0.50001, None),
        (6, 0.51, "the loss of step 6 is 2.0e-02 from that of 2 processes"),
    ],
)
def test_another_number_of_processes_may_round_otherwise_and_not_more(run, changed, step, loss, complaint):
    assert changed.distances("memory", run) == []
    content = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    write_journal(run, [{**e, "loss": loss} if e["kind"] == "step" and e["step"] == step else e for e in content])
    assert changed.distances("memory", run) == ([complaint] if complaint else [])


def test_other_weights_and_metrics_of_another_number_of_processes_are_noticed(run, changed):
    (run / "eval" / "test" / "result.json").write_text(json.dumps({"metrics": {"R@1": 0.6}}))
    CheckpointStore(run / "checkpoints").save(torch.nn.Linear(2, 2), {"step": 6}, step=6, epoch=1, metrics={})
    found = changed.distances("memory", run)
    assert re.match("(weight|bias) is .* from that of 2 processes", found[0])
    assert found[-1] == "R@1 is 1.0e-01 from that of 2 processes"
