"""A few cases of each kind of wrong input, and proof that a wrong answer would be noticed."""

import pickle
import random
import time

import pytest
from benchmarks.trials.corruption import MUST_BE_REFUSED, damaged, malformed_lines, malicious_pickle
from benchmarks.trials.fuzz import SHARES, divided, kinds, run_case
from benchmarks.trials.fuzz_case import Case, judge

SEED = 1
CASES = divided(150, commands=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", SHARES)
def test_wrong_input_is_handled_or_refused_with_a_clear_error(kind, root):
    maker = kinds(root)[kind]
    assert CASES[kind] > 0
    for number in range(CASES[kind]):
        what, verdict = run_case(maker, number, SEED, root)
        assert verdict.fault is None, f"{kind} {number} of seed {SEED}, {what}: {verdict.fault}: {verdict.message}"


def test_as_many_cases_as_asked_for():
    assert sum(divided(1000, commands=30).values()) >= 1030
    assert divided(1000, commands=30)["commands"] == 30
    assert all(divided(150, commands=1).values())


def answer(error: BaseException | None):
    def call():
        if error is not None:
            raise error

    return call


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("list.txt: line 3 is odd"), "clear error"),
        (FileNotFoundError("list.txt is missing"), "clear error"),
        (ValueError("invalid literal for int()"), "unclear error"),
        (ValueError("list.txt " + "x" * 10_000), "unclear error"),
        (ValueError("list.txt \x1b[2J"), "unclear error"),
        (KeyError("list.txt"), "crash"),
        (RuntimeError("list.txt"), "crash"),
        (MemoryError(), "crash"),
        (None, "handled"),
    ],
)
def test_answers_are_told_apart(error, outcome, tmp_path):
    verdict = judge(Case("x", answer(error), ("list.txt",)), tmp_path / "canary")
    assert verdict.outcome == outcome
    assert (verdict.fault is None) == (outcome in ("clear error", "handled"))


def test_what_must_be_refused_is_a_failure_when_accepted(tmp_path):
    assert judge(Case("x", answer(None), ("x",), refused=True), tmp_path / "canary").outcome == "accepted"


def test_a_hang_is_a_failure(tmp_path):
    verdict = judge(Case("x", lambda: time.sleep(5), ("x",), seconds=0.2), tmp_path / "canary")
    assert verdict.outcome == "hang"


def test_executed_code_is_a_failure(tmp_path):
    canary = tmp_path / "canary"
    content = malicious_pickle(canary, random.Random(0))
    verdict = judge(Case("x", lambda: pickle.loads(content), ("x",)), canary)
    assert verdict.outcome == "code executed"
    assert not canary.exists()


def test_damage_always_changes_something_and_repeats():
    for number in range(200):
        what, content = damaged(b"some bytes" * 20, random.Random(number))
        assert content != b"some bytes" * 20, what
        assert damaged(b"some bytes" * 20, random.Random(number)) == (what, content)


def test_every_damage_of_lists_is_drawn():
    lines = ["image_id class_id path", *(f"{i} {i // 2} a/{i}.jpg" for i in range(6))]
    drawn = [malformed_lines(lines, random.Random(number)) for number in range(600)]
    names = {what.rpartition(" (")[0] for what, _, _ in drawn}
    assert len(names) > 25
    assert names >= MUST_BE_REFUSED
    assert all(content != "".join(f"{line}\n" for line in lines).encode() for what, content, refused in drawn if refused)
