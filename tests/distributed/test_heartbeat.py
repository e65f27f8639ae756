"""A process that no longer responds is named in time, and given up after the limit."""

import os
import signal
import subprocess
import sys

import torch.distributed as dist

from rankgrad.train.heartbeat import Heartbeat


def three(limit=600.0):
    store = dist.HashStore()
    return [Heartbeat(store, rank, 3, limit=limit, now=0.0) for rank in range(3)]


def run(beats, until, *, start=5.0, alive=(0, 1, 2)):
    """Lets processes beat every 5 seconds; what each found silent at the end."""
    found, now = {}, start
    while now <= until:
        for rank in alive:
            found[rank] = beats[rank].beat(now)
        now += 5
    return found


def test_processes_that_respond_are_left_alone(capsys):
    assert run(three(), 2000) == {0: [], 1: [], 2: []}
    assert capsys.readouterr().err == ""


def test_a_silent_process_is_named_once_and_given_up_after_the_limit(capsys):
    beats = three()
    run(beats, 100)
    assert run(beats, 690, start=105, alive=(0, 2)) == {0: [], 2: []}
    message = "rankgrad: rank 1 has not responded for 60 s; the run ends after 600 s of silence\n"
    assert capsys.readouterr().err == message, "said once, by the first process"
    assert run(beats, 705, start=695, alive=(0, 2)) == {0: [1], 2: [1]}


def test_the_first_process_that_responds_speaks(capsys):
    beats = three()
    run(beats, 200, start=5, alive=(1, 2))
    assert capsys.readouterr().err.count("rank 0 has not responded for 60 s") == 1


def test_a_process_that_comes_back_is_welcome(capsys):
    beats = three()
    run(beats, 100)
    run(beats, 300, start=105, alive=(0, 2))
    assert run(beats, 400, start=305) == {0: [], 1: [], 2: []}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "rankgrad: rank 1 has not responded for 60 s", "rankgrad: rank 1 responds again"
    ]  # fmt: skip


def test_a_process_that_was_stopped_itself_does_not_blame_the_others():
    beats = three()
    run(beats, 100)
    assert beats[1].beat(5000) == []


def test_a_short_limit_is_reported_earlier():
    (beat, *_) = three(limit=6.0)
    assert beat.report_after == 3
    assert beat.interval == 1


def test_a_silent_process_of_this_machine_is_killed(capsys):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(child.pid, signal.SIGSTOP)
    first, other, _ = three()
    other.beat(1.0)
    first.beat(1.0)
    value, since = first.seen[1]
    first.seen[1] = (value.replace(str(os.getpid()).encode(), str(child.pid).encode()), since)
    first.give_up([1])
    assert child.wait(timeout=20) == -signal.SIGKILL
    assert "rank 1 has not responded for 600 s and is ended" in capsys.readouterr().err
