"""A soak of seconds, and proof that a leak would be noticed."""

import numpy as np
import pytest
from benchmarks.trials.soak import FIGURES, Watched
from faults.test_kill import trial


def watched(**values) -> Watched:
    """Ten minutes, a look every three seconds."""
    times = np.arange(0, 600, 3.0)
    flat = {name: np.full(len(times), 10.0) for name in FIGURES}
    return Watched(list(times), {name: list(column) for name, column in {**flat, **values}.items()})


MINUTES = np.arange(0, 600, 3.0) / 60
NOISE = np.random.default_rng(0).normal(0, 2, 200)


@pytest.mark.parametrize(
    ("name", "values", "is_leak"),
    [
        ("resident memory", 500 + NOISE, False),
        ("resident memory", 500 + NOISE + 1.0 * MINUTES, True),
        ("resident memory", 500 + NOISE - 1.0 * MINUTES, False),
        # an arena that the allocator takes at the end, and a warm-up, are no leaks
        ("resident memory", 500 + NOISE + 8.0 * (MINUTES > 9.5), False),
        ("resident memory", 500 + NOISE + 300 * np.minimum(MINUTES / 2, 1), False),
        ("GPU memory", 100 + 0.6 * MINUTES, True),
        ("open files", 7 + (np.arange(200) % 3 == 0), False),
        ("open files", 7 + np.floor(MINUTES), True),
        ("threads", 3 + np.floor(MINUTES), True),
    ],
)
def test_what_grows_is_told_from_what_does_not(name, values, is_leak):
    found = watched(**{name: values}).leaks(limit=0.5)
    assert [leak.startswith(name) for leak in found] == ([True] if is_leak else [])


def test_a_short_soak_stops_when_asked_to():
    # the warm-up of seconds is not over, so that memory may grow by anything; files and threads may not
    done = trial("benchmarks.trials.soak", "--minutes", "0.1", "--limit", "1e6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing grows" in done.stdout
    assert "checkpoints" in done.stdout
