"""The text study: splits without shared intents, batches, choices on validation, a whole quick run that continues."""

import csv
import json

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from benchmarks import text_study
from benchmarks.text import intents, training
from benchmarks.text.losses import LOSSES
from benchmarks.text.report import _shown, chosen_settings, paired_difference, report
from tiny_encoder import sentence_encoder

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend

WORDS = ["card", "balance", "transfer", "pin", "fee", "limit", "rate", "loan"]
FRAMES = ["help with {}", "my {} again", "the {} please", "what {} is", "new {} now", "{} lost"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("intents")
    rows = [(frame.format(word), word) for word in WORDS for frame in FRAMES]
    for part, chosen in (("train", rows[::2]), ("test", rows[1::2])):
        with (place / f"banking77_{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "category"), *chosen])
    parts = {"train": rows[0::3], "val": rows[1::3], "test": rows[2::3], "oos_test": [("nothing", "oos")]}
    (place / "clinc150_data_full.json").write_text(json.dumps(parts))
    return place


@pytest.mark.parametrize("name", list(intents.DATA))
def test_splits_share_no_intents_unless_published(folder, name):
    found = intents.DATA[name](folder)
    assert len(found.texts) == 48
    disjoint, validation, published = (intents.split(found, name) for name in ("disjoint", "validation", "published"))
    used = {part: set(found.labels[getattr(disjoint, part)].tolist()) for part in ("train", "test")}
    assert not used["train"] & used["test"]
    assert len(disjoint.train) + len(disjoint.test) == 48
    chosen_from = set(found.labels[validation.train].tolist()) | set(found.labels[validation.test].tolist())
    assert chosen_from == used["train"]
    assert not set(validation.train.tolist()) & set(validation.test.tolist())
    assert published.gallery is published.train
    assert not set(published.train.tolist()) & set(published.test.tolist())


def test_batches_hold_each_intent_once_before_any_twice():
    labels = np.repeat(np.arange(5), [4, 6, 4, 8, 4])
    for batch in training.batches(labels, 8, 2, 20, seed=0):
        assert len(set(labels[batch[0::2]])) == 4
        assert (labels[batch[0::2]] == labels[batch[1::2]]).all()
    whole = np.concatenate(list(training.batches(labels, 10, 2, 2, seed=0)))
    assert sorted(whole[labels[whole] == 0].tolist()) == [0, 1, 2, 3]


def test_half_of_the_scored_pairs_are_of_different_intents():
    labels = np.repeat(np.arange(8), 2)
    (first, second), score = training._columns("scored pair", np.arange(16), labels)
    assert score.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ((labels[first] == labels[second]) == score).all()


def test_the_choice_is_the_best_on_validation_intents():
    rows = [
        {"stage": stage, "data": "A", "loss": "L", "setting": setting, "lr": lr, "mAP": value}
        for stage, setting, lr, value in (
            ("choice", "s", "0.1", "0.5"),
            ("choice", "t", "0.2", "0.6"),
            ("loss", "s", "0.1", "0.9"),
        )
    ]
    assert chosen_settings(rows) == {("A", "L"): ("t", 0.2)}


def test_lower_rates_are_tried_until_one_is_worse():
    def rows(values):
        return [
            {"stage": "choice", "data": "A", "loss": "L", "setting": setting, "lr": str(lr), "mAP": str(value)}
            for (setting, lr), value in values.items()
        ]

    def rates(values):
        return [(run.setting, run.lr) for run in text_study.lower_runs(rows(values), texts=8, batch=4)]

    values = {("s", 3e-5): 0.5, ("s", 1e-4): 0.4, ("t", 3e-5): 0.45}
    assert rates(values) == [("s", 1e-5)]
    assert rates(values | {("s", 1e-5): 0.6}) == [("s", 3e-6)]
    assert rates(values | {("s", 1e-5): 0.4}) == []
    assert rates({("s", 3e-5): 0.5, ("s", 1e-4): 0.6}) == []
    assert chosen_settings(rows(values | {("s", 1e-5): 0.6}), lowest=3e-5) == {("A", "L"): ("s", 3e-5)}


def test_a_loss_not_yet_run_at_its_chosen_rate_is_shown_at_another_and_named():
    def row(stage, lr, value, split="validation"):
        found = {"stage": stage, "data": "A", "loss": "L", "setting": "s", "lr": lr, "mAP": value, "split": split}
        return {name: str(each) for name, each in found.items()}

    rows = [row("choice", 3e-5, 0.5), row("choice", 1e-5, 0.6), row("choice", 1e-4, 0.4)]
    disjoint = [row("loss", 3e-5, 0.7, "disjoint"), row("loss", 1e-4, 0.8, "disjoint")]
    shown, late = _shown(rows, disjoint, chosen_settings(rows))
    assert ([each["lr"] for each in shown], late) == (["3e-05"], ["`L` on A, disjoint"])
    shown, late = _shown(rows, [*disjoint, row("loss", 1e-5, 0.6, "disjoint")], chosen_settings(rows))
    assert ([each["lr"] for each in shown], late) == (["1e-05"], [])


def test_the_paired_difference_weighs_intents_by_their_queries():
    mean, low, high = paired_difference(np.array([0.1, 0.4]), np.array([3, 1]))
    assert mean == pytest.approx(0.175)
    assert (low, high) == pytest.approx((0.1, 0.4))


def test_a_quick_run_continues_and_reports(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_study, "RATES", (1e-3,))
    monkeypatch.setattr(text_study, "LOWER_RATES", ())
    monkeypatch.setattr(text_study, "DATA", {"BANKING77": intents.banking77})
    monkeypatch.setattr(text_study, "ProcessPoolExecutor", _Here)
    model = tmp_path / "model"
    sentence_encoder(model, [*WORDS, *FRAMES]).save(str(model))
    file, page = tmp_path / "rows.csv", tmp_path / "page.md"
    command = ["--csv", str(file), "--data", str(folder), "--model", str(model), "--quick", "--device", "cpu"]
    assert text_study.main([*command, "--report", str(page)]) == 0
    rows = text_study.read(file)
    losses = len(LOSSES)
    expected = {"untrained": 2, "choice": 2 * losses, "loss": 2 * losses, "cached": 3, "batch": 4}
    assert {stage: sum(row["stage"] == stage for row in rows) for stage in expected} == expected
    text = page.read_text()
    assert all(name in text for name in LOSSES)
    assert "the best of each on the validation intents" in text
    # what is there is not run again, what was cut off is
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    capsys.readouterr()
    assert text_study.main(command) == 0
    assert capsys.readouterr().out.count("mAP") == 1
    again = text_study.read(file)
    assert [row["mAP"] for row in again] == [row["mAP"] for row in rows]
    assert report(again, 1e-3) == text.rstrip("\n")


class _Here:
    """The pool's interface in this process."""

    def __init__(self, *_, **__): ...

    def submit(self, function, *arguments):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_): ...
