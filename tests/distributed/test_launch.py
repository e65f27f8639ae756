"""The command line with `--processes`: a process that is killed is named, and the run goes on with another number of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_processes import alive, killed, ranks

from rankgrad import cli
from rankgrad.cli import train_commands
from rankgrad.runs import equivalence
from rankgrad.train.errors import FailedProcessError

SECONDS = 60
LENGTH = "6"  # epochs: long enough to be killed on the way
RUN = ["glyphs-recall-at-k", "--debug", "--device", "cpu", "--no-tensorboard", "--epochs", LENGTH, "--checkpoint-every", "3"]

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for ranks in /proc")


def command(*arguments):
    return [sys.executable, "-m", "rankgrad.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def begun(folder, *arguments):
    """A run of two processes that has written its first checkpoint."""
    line = command("train", *RUN, "--out", folder, "--processes", "2", *arguments)
    started = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    patience = time.monotonic() + SECONDS
    while not (folder / "checkpoints" / "last.json").exists():
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.05)
    return started


def entries_of(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@NEEDS_PROC
@pytest.mark.usefixtures("environment")
def test_a_killed_process_is_named_and_the_run_goes_on(tmp_path, capsys):
    folder = tmp_path / "run"
    started = begun(folder)
    assert killed(ranks(folder)[1])
    struck = time.monotonic()
    _, said = started.communicate(timeout=SECONDS)
    assert time.monotonic() - struck < 20
    assert started.returncode == 2
    last = json.loads((folder / "checkpoints" / "last.json").read_text())["folder"]
    assert said.strip().splitlines()[-1] == (
        f"rankgrad train: rank 1 of 2 processes was ended by SIGKILL; the last checkpoint is {folder / 'checkpoints' / last}. "
        f"Continue with: rankgrad train --resume {folder} --processes 2"
    )
    assert "Traceback" not in said

    assert cli.main(["train", "--resume", str(folder), "--device", "cpu", "--no-tensorboard"]) == 0
    assert "R@1" in capsys.readouterr().out
    journal = entries_of(folder)
    steps = [entry["step"] for entry in journal if entry["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert [(e["kind"], e["processes"]) for e in journal if e["kind"] in ("start", "resume")] == [("start", 2), ("resume", 1)]
    assert journal[-1]["reason"] == "finished"


@NEEDS_PROC
@pytest.mark.usefixtures("environment")
def test_a_killed_launcher_takes_its_processes_along(tmp_path):
    folder = tmp_path / "run"
    started = begun(folder)
    started.kill()
    patience = time.monotonic() + 20
    while alive(folder):
        assert time.monotonic() < patience
        time.sleep(0.05)
    _, said = started.communicate(timeout=SECONDS)
    assert "Traceback" not in said
    assert entries_of(folder)[-1]["reason"] in ("interrupted", "finished")


@NEEDS_PROC
@pytest.mark.usefixtures("environment")
def test_a_stopped_process_is_named_and_given_up(tmp_path):
    folder = tmp_path / "run"
    started = begun(folder, "--process-timeout", "12")
    os.kill(ranks(folder)[1], signal.SIGSTOP)
    struck = time.monotonic()
    _, said = started.communicate(timeout=SECONDS)
    assert time.monotonic() - struck < 45
    assert started.returncode == 2
    assert "rankgrad: rank 1 has not responded for" in said
    assert "rankgrad: rank 1 has not responded for 12 s and is ended" in said
    assert "rank 1 of 2 processes was ended by SIGKILL" in said.strip().splitlines()[-1]
    assert "Traceback" not in said


@NEEDS_PROC
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_signal_to_the_launcher_ends_it_promptly(tmp_path, stopped):
    folder = tmp_path / "run"
    started = begun(folder, "--epochs", "500")
    if stopped:
        os.kill(ranks(folder)[1], signal.SIGSTOP)
    started.terminate()
    struck = time.monotonic()
    _, said = started.communicate(timeout=SECONDS)
    assert time.monotonic() - struck < 20, "torchrun waits 30 s for a process that does not end"
    assert started.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said
    assert "death signal" not in said
    if not stopped:
        assert entries_of(folder)[-1]["reason"] == "interrupted"


@pytest.mark.usefixtures("environment")
def test_a_mistake_is_told_once_and_not_by_every_process(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    line = command("train", *RUN, "--out", tmp_path / "run", "--processes", "2")
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 2
    refusal = "already exists and is not empty: choose another folder with --out"
    assert done.stderr == f"rankgrad train: {tmp_path / 'run'} {refusal}\n"


@pytest.mark.usefixtures("environment")
def test_check_equivalence_prints_returns_0_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = command("check-equivalence", "glyphs-fastap", "--debug", "--device", "cpu", "--processes", "2")
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=SECONDS)
    # torch itself makes a cache for compiled code
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert done.returncode == 0, done.stderr
    assert "1 process against 2 (4 + 5 images), float64" in done.stdout
    assert "they agree (to 1e-09)" in done.stdout


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ([], "Nothing of the run was written: start it again"),
        (["recipe.json"], "Continue with: rankgrad train --resume {} --processes 2"),
    ],
)
def test_only_what_was_begun_is_to_be_resumed(monkeypatch, tmp_path, capsys, files, way):
    def launch(arguments, processes):
        raise FailedProcessError("rank 1 of 2 processes was ended by SIGKILL")

    monkeypatch.setattr(train_commands, "launch", launch)
    for name in files:
        (tmp_path / name).touch()
    assert cli.main(["train", "glyphs-fastap", "--out", str(tmp_path), "--processes", "2"]) == 2
    died = "rankgrad train: rank 1 of 2 processes was ended by SIGKILL; no checkpoint was written yet."
    assert capsys.readouterr().err == f"{died} {way.format(tmp_path)}\n"


def test_check_equivalence_returns_1_where_processes_disagree(monkeypatch, capsys):
    def compare(task, *, images):
        return equivalence.Equivalence(2, (7, 8), (0.5, 0.4), (0.5, "head"), 3, {"R@1": (0.5, 0.5)}, agrees=False)

    monkeypatch.setattr(equivalence, "compare_processes", compare)
    monkeypatch.setattr(train_commands, "launched", lambda: True)
    assert cli.main(["check-equivalence", "glyphs-fastap"]) == 1
    assert "they DO NOT agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "glyphs-fastap", "--processes", "0"], "--processes must be at least 1, got 0"),
        (["train", "glyphs-fastap", "--parallel", "dp"], "argument --parallel: invalid choice: 'dp'"),
        (["check-equivalence", "glyphs-fastap", "--images", "1"], "--images must be at least the number of processes (2)"),
        (["check-equivalence"], "name a recipe, or your own images with --data"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_starts(arguments, message, capsys):
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
