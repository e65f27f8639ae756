"""Sweeps and studies: what is chosen on what, what is run once, and what a crash leaves."""

import csv
import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankgrad import cli
from rankgrad.cli.train_commands import parse_seeds
from rankgrad.recipes.catalogue import find
from rankgrad.recipes.studies import STUDIES, studies_of
from rankgrad.runs import study, sweep, trials
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.ledger import (
    Entry,
    Ledger,
    as_csv,
    curves_as_csv,
    key_of,
    mean_and_deviation,
    percentages,
    with_interval,
)
from rankgrad.runs.pipeline import TrialResult
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext, TestIdentity
from rankgrad.train.errors import NotFiniteError, TrainingError

CPU = torch.device("cpu")
RECIPE = find("omniglot-recall-at-k")


VALIDATION = {0.1: 0.50, 0.2: 0.70, 0.3: 0.60}
TEST = {0.1: 0.50, 0.2: 0.55, 0.3: 0.90}


class FakeTraining:
    """Scores that are known: validation prefers lr 0.2, the test classes would prefer 0.3; seeds add a little."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.runs: list[tuple[str, float, int, str]] = []
        self.fail_at = fail_at

    def __call__(self, task, folder, *, splits, **options):
        recipe = task.recipe
        if len(self.runs) == self.fail_at:
            raise RuntimeError("the power went out")
        self.runs.append((recipe.validation, recipe.lr, recipe.seed, ",".join(splits)))
        scores = VALIDATION if splits == ["validation"] else TEST
        value = scores[recipe.lr] + 0.01 * recipe.seed
        return TrialResult({split: {"R@1": value, "mAP": value / 2} for split in splits}, 1.5)


class FakeTask:
    def __init__(self, recipe=RECIPE, data="some"):
        self.recipe, self.data = recipe, data
        self.context = RunContext(None, CPU)

    def with_recipe(self, recipe):
        return FakeTask(recipe, self.data)

    def for_selection(self):
        return self.with_recipe(replace(self.recipe, validation="half"))

    def data_identity(self):
        return {split: DataIdentity.of(f"{self.data} {split}", ()) for split in ("train", "test")}

    def test_splits(self):
        return ["test"]


def run_sweep(folder: Path, training, monkeypatch, *, data="some", **options):
    monkeypatch.setattr(trials, "train_and_evaluate", training)
    return sweep.run_sweep(FakeTask(data=data), {"lr": (0.1, 0.2, 0.3)}, (0, 1), folder, **options)


def test_validation_classes_choose_and_the_choice_is_tested_once(tmp_path, monkeypatch):
    training = FakeTraining()
    found = run_sweep(tmp_path, training, monkeypatch)
    assert found.chosen == {"lr": 0.2}
    assert training.runs == [
        *(("half", lr, seed, "validation") for lr in (0.1, 0.2, 0.3) for seed in (0, 1)),
        ("none", 0.2, 0, "test"),
        ("none", 0.2, 1, "test"),
    ]
    report = found.report()
    assert re.search(r"\| lr=0\.2 \* \| +70\.5 ± 0\.7 \|", report)
    assert re.search(r"\| test +\| 55\.5 ± 0\.7 \|", report)
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["changes"], row["seed"], row["R@1"]) for row in rows[-3:]] == [
        ("validation", "lr=0.3", "1", "0.610000"),
        ("test", "lr=0.2", "0", "0.550000"),
        ("test", "lr=0.2", "1", "0.560000"),
    ]
    summary = json.loads((tmp_path / "sweep.json").read_text())
    assert summary["chosen"] == {"lr": 0.2}
    assert summary["flags"] == ["--lr=0.2"]
    assert len(summary["runs"]) == 8


def test_another_metric_may_choose_and_an_unknown_one_is_refused(tmp_path, monkeypatch):
    assert run_sweep(tmp_path / "a", FakeTraining(), monkeypatch, metric="mAP").metric == "mAP"
    with pytest.raises(ValueError, match="--metric must be one of R@1, mAP, got 'R@7'"):
        run_sweep(tmp_path / "b", FakeTraining(), monkeypatch, metric="R@7")


def test_a_crashed_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    crashing = FakeTraining(fail_at=3)
    with pytest.raises(RuntimeError, match="power"):
        run_sweep(tmp_path, crashing, monkeypatch)
    # the last line was being written
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(ledger.read_text()[:-20])
    rest = FakeTraining()
    found = run_sweep(tmp_path, rest, monkeypatch)
    assert found.chosen == {"lr": 0.2}
    assert rest.runs[0] == crashing.runs[2]
    assert len(rest.runs) == 6
    nothing = FakeTraining()
    assert run_sweep(tmp_path, nothing, monkeypatch).report() == found.report()
    assert nothing.runs == []


def test_other_data_is_not_answered_with_results_of_the_first(tmp_path, monkeypatch):
    run_sweep(tmp_path, FakeTraining(), monkeypatch, data="cars")
    other = FakeTraining()
    run_sweep(tmp_path, other, monkeypatch, data="birds")
    assert len(other.runs) == 8
    for known in ("cars", "birds"):
        again = FakeTraining()
        run_sweep(tmp_path, again, monkeypatch, data=known)
        assert again.runs == []


def test_another_data_set_to_test_on_is_other_data(tmp_path, monkeypatch):
    class Elsewhere(FakeTask):
        images = "paris"

        def data_identity(self):
            return {"train": DataIdentity.of("train", ())}

        def test_identity(self, split):
            return TestIdentity(f"{self.images} {split}", "protocol")

    ran = []
    for Elsewhere.images in ("paris", "paris", "oxford"):
        training = FakeTraining()
        monkeypatch.setattr(trials, "train_and_evaluate", training)
        for split in ("validation", "test"):
            recipe = replace(RECIPE, lr=0.1)
            trials.Trials(tmp_path, checkpoints="none").run(Elsewhere(recipe), [split], "", group="", label="", changes={})
        ran.append([splits for *_, splits in training.runs])
    # nothing was validated on it
    assert ran == [["validation", "test"], [], ["test"]]


def test_entries_of_ledgers_that_do_not_know_their_data_count_on_any(tmp_path, monkeypatch, capsys):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for lr in VALIDATION:
        for seed in (0, 1):
            for split, scores, chosen in (("validation", VALIDATION, "half"), ("test", TEST, "none")):
                recipe = replace(RECIPE, lr=lr, seed=seed, validation=chosen)
                ledger.add(Entry(key_of(recipe, split), "", "", {}, seed, split, {"R@1": scores[lr], "mAP": 0.1}, 1.0))
    training = FakeTraining()
    assert run_sweep(tmp_path, training, monkeypatch).chosen == {"lr": 0.2}
    assert training.runs == []
    told = f"note: {ledger.path} has results that were saved without fingerprints of their data"
    assert told in capsys.readouterr().out
    # but the folder of a run may know them
    for data, trained in (("some", 0), ("other", 1)):
        run = RunFolder(tmp_path / "runs" / "validation-lr=0.1-seed=0")
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_data_identity(FakeTask(data=data).data_identity())
        run_sweep(tmp_path, training, monkeypatch)
        assert len(training.runs) == trained


def test_the_published_ledger_is_read(tmp_path):
    published = Path(__file__).parents[2] / "benchmarks" / "results" / "cars-nvidia-h200-ledger.jsonl"
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(published.read_bytes())
    keys = {json.loads(line)["key"] for line in path.read_text().splitlines()}
    assert len(Ledger(path)) == len(keys) > 0


def test_a_real_sweep_on_other_data_is_refused_and_names_it(tree, tmp_path, capsys):
    command = ["sweep", "--debug", "--grid", "lr=1e-3", "--out", str(tmp_path / "s"), "--device", "cpu", "--cache", "none"]
    other = Path(shutil.copytree(tree("folder"), tmp_path / "other"))
    images = sorted(path for path in other.rglob("*") if path.suffix in (".jpg", ".png"))
    images[0].write_bytes(images[0].read_bytes() + b" ")
    assert cli.main([*command, "--data", str(tree("folder"))]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--data", str(other)]) == 2
    told = capsys.readouterr().err
    assert "the data has changed since" in told
    assert f"images replaced in 1 class ({images[0].parent.name})" in told
    assert "start a new run in another folder (--out DIR)" in told


def test_a_wrong_combination_is_found_before_anything_runs(tmp_path, monkeypatch):
    training = FakeTraining()
    monkeypatch.setattr(trials, "train_and_evaluate", training)
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of `per_class`"):
        sweep.run_sweep(FakeTask(), {"batch_size": (960, 961)}, (0,), tmp_path)
    assert training.runs == []


def test_grids():
    grid = sweep.parse_grid(["lr=1e-4,3e-4", "--batch-size=8,16", "ks=1,2/1,2,4", "simix=true,false"])
    assert grid == {"lr": (1e-4, 3e-4), "batch_size": (8, 16), "ks": ((1, 2), (1, 2, 4)), "simix": (True, False)}
    made = sweep.combinations(grid)
    assert len(made) == 16
    assert made[1] == {"lr": 1e-4, "batch_size": 8, "ks": (1, 2), "simix": False}
    assert sweep.label_of(made[0]) == "lr=0.0001 batch_size=8 ks=1,2 simix=yes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["lr"], "--grid must be SETTING=VALUE,VALUE,..., got 'lr'"),
        (["lrr=1"], "there is no setting 'lrr': did you mean 'lr'?"),
        (["lr=fast"], "`lr` must be a finite number, got 'fast'"),
        (["seed=1,2"], "seed is set by the sweep itself"),
        (["lr=1", "lr=2"], "lr is given twice"),
    ],
)
def test_wrong_grids(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sweep.parse_grid(text)


def test_seeds():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("0,7") == (0, 7)
    assert parse_seeds("5,") == (5,)
    for wrong in ("", "x", "0", "1,1", "-1"):
        with pytest.raises(ValueError, match="--seeds must"):
            parse_seeds(wrong)


def test_mean_and_deviation():
    values = [0.5, 0.7, 0.9]
    assert mean_and_deviation(values) == pytest.approx((0.7, statistics.stdev(values)))
    assert mean_and_deviation([0.5]) == (0.5, 0.0)
    entries = [Entry(str(v), "g", "l", {}, 0, "test", {"R@1": v}, 1.0) for v in values]
    assert percentages(entries, "R@1") == "70.0 ± 20.0"
    assert percentages(entries[:1], "R@1") == "50.0"
    assert as_csv([replace(entries[0], changes={"ks": (1, 2)}), replace(entries[1], metrics={"mAP": 1.0})]).splitlines() == [
        "group,label,changes,seed,split,R@1,mAP,seconds",
        'g,l,"ks=1,2",0,test,0.500000,,1.0',
        "g,l,,0,test,,1.000000,1.0",
    ]


def test_the_ledger_survives_its_process(tmp_path):
    entry = Entry("key", "group", "label", {"lr": 0.1}, 3, "test", {"R@1": 0.5}, 2.0)
    Ledger(tmp_path / "sub" / "ledger.jsonl").add(entry)
    assert Ledger(tmp_path / "sub" / "ledger.jsonl").get("key") == entry
    assert Ledger(tmp_path / "sub" / "ledger.jsonl").get("other") is None


@pytest.mark.parametrize("chosen", studies_of(RetrievalRecipe).values(), ids=studies_of(RetrievalRecipe))
def test_every_line_of_a_study_is_a_recipe(chosen):
    assert len({v.label for v in chosen.variations if v.group == chosen.variations[0].group}) > 1
    for variation in chosen.variations:
        recipe = chosen.base.with_settings(variation.changes)
        for grid in variation.grids:
            for value in grid.values:
                recipe.with_settings({grid.setting: value})


def test_every_line_of_omniglot_sees_as_many_images():
    chosen, images = STUDIES["omniglot"], 19_280
    sized = {v.label: study.match_budget(chosen.base, chosen.base.with_settings(v.changes), images) for v in chosen.variations}
    seen = chosen.base.epochs * images
    for recipe in sized.values():
        # half a batch is the most that rounding can cost
        assert abs(recipe.steps * recipe.batch_size - seen) <= recipe.batch_size / 2
        assert 0 < recipe.warmup_steps < recipe.steps
    groups = {v.group for v in chosen.variations}
    assert groups == {"loss", "sampling", "batch size", "bins", "k", "temperature", "memory", "margin"}
    # every preset with and without SiMix
    of_losses = [sized[v.label] for v in chosen.variations if v.group == "loss"]
    assert {(recipe.loss, recipe.simix) for recipe in of_losses} == {
        (loss, simix) for loss in ("recall-at-k", "smooth-ap", "fastap", "rambo-recall", "rambo-ap") for simix in (False, True)
    }
    with pytest.raises(ValueError, match="'colour' matches no line of the study omniglot; its groups are loss, sampling"):
        chosen.chosen("colour")
    assert {v.group for v in chosen.chosen("bins")} == {"bins"}
    assert {v.label for v in chosen.chosen("*category*")} == {"FastAPLoss, category-hard", "RecallAtKLoss, category-hard"}


def test_the_same_settings_in_two_groups_run_once(tree, tmp_path, monkeypatch, capsys):
    ran = []

    def training(task, run, *, splits, **options):
        recipe = task.recipe
        ran.append(recipe)
        (run.path / "checkpoints").mkdir(parents=True)
        value = 0.5 + 0.001 * recipe.bins + 0.0001 * recipe.seed
        return TrialResult({"test": dict.fromkeys(STUDIES["omniglot"].metrics, value)}, 2.0)

    monkeypatch.setattr(trials, "train_and_evaluate", training)
    chosen = STUDIES["omniglot"]
    task = RetrievalTask(chosen.base, RunContext(tree("omniglot"), CPU))
    changes = {"partial": True, "batch_size": 12}
    table = study.run_study(chosen, task, (0, 1), tmp_path, changes=changes, only="FastAPLoss")
    labels = [v.label for v in chosen.chosen("FastAPLoss")]
    # FastAP with 10 bins stands in three groups
    assert len(ran) == 2 * (len(labels) - 2)
    assert len({json.dumps(recipe.settings()) for recipe in ran}) == len(ran)
    for label in labels:
        assert re.search(rf"^\| {re.escape(label)} +\|", table, re.MULTILINE), label
    assert re.search(r"^\| FastAPLoss, 20 bins +\| 52\.0 ± 0\.0 \|", table, re.MULTILINE)
    assert (tmp_path / "omniglot.md").read_text() == table + "\n"
    with (tmp_path / "omniglot.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(labels)


class PeakedTraining:
    """Validation and test R@1 fall off from lr 8e-3 and bins 20; what ran is recorded."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, float, int, int, int]] = []

    def __call__(self, task, folder, *, splits, watch, checkpoints, **options):
        recipe, [split] = task.recipe, splits
        assert not checkpoints
        assert watch == (split == "test")
        self.runs.append((split, recipe.lr, recipe.bins, recipe.seed, recipe.epochs))
        value = 1 - 0.1 * abs(math.log2(recipe.lr / 8e-3)) - 0.01 * abs(recipe.bins - 20)
        metrics = {"R@1": value, "mAP@R": value / 2}
        found = TrialResult({split: metrics}, 60.0)
        if split == "validation":
            return found
        curves = {split: [(1, {"R@1": value / 2, "mAP@R": 0.1, "other": 0.0}), (2, metrics)]}
        return replace(found, intervals={split: {"R@1": (value - 0.01, value + 0.03), "other": (0.0, 1.0)}}, curves=curves)


RATES = study.Grid("lr", (1e-3, 2e-3, 4e-3), extends=True)
CHOOSING = study.Study(
    "choosing",
    replace(RECIPE, loss="fastap", epochs=9),
    (
        study.Variation("g", "both", {}, grids=(RATES, study.Grid("bins", (10, 20)))),
        study.Variation("g", "fixed", {"lr": 8e-3}),
    ),
    metrics=("R@1", "mAP@R"),
    selection=study.Selection(("R@1", "mAP@R"), {"epochs": 3}),
    watches=True,
)


def run_choosing(folder, monkeypatch, tree, **options):
    training = PeakedTraining()
    monkeypatch.setattr(trials, "train_and_evaluate", training)
    task = RetrievalTask(CHOOSING.base, RunContext(tree("omniglot"), CPU))
    changes = {"partial": True, "batch_size": 12, **options.pop("changes", {})}
    return training.runs, study.run_study(CHOOSING, task, (0, 1), folder, changes=changes, **options)


def test_open_settings_are_chosen_on_validation_classes_one_after_another(tree, tmp_path, monkeypatch):
    runs, table = run_choosing(tmp_path, monkeypatch, tree)
    assert runs == [
        # the best of three rates is the last one, so larger ones are tried until they are worse
        *(("validation", lr, 10, 0, 3) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)),
        # 10 bins at the chosen rate were run before
        ("validation", 8e-3, 20, 0, 3),
        ("test", 8e-3, 20, 0, 9),
        ("test", 8e-3, 10, 0, 9),
        ("test", 8e-3, 20, 1, 9),
        ("test", 8e-3, 10, 1, 9),
    ]
    assert re.search(
        r"^\| both +\| 100\.0 ± 0\.0 \[99\.0, 103\.0\] \| 50\.0 ± 0\.0 +\| lr=0\.008 bins=20 \|", table, re.MULTILINE
    )
    with (tmp_path / "choosing.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["split"], row["changes"]) for row in rows[5:9]] == [
        ("validation", "lr=0.008 bins=10"),
        ("validation", "lr=0.008 bins=20"),
        ("test", "lr=0.008 bins=20"),
        ("test", "lr=0.008 bins=20"),
    ]
    assert (rows[0]["R@1 low"], rows[8]["R@1 low"], rows[8]["R@1 high"]) == ("", "0.990000", "1.030000")
    with (tmp_path / "choosing-curves.csv").open(newline="") as file:
        curve = [(row["label"], row["seed"], row["epoch"], row["R@1"]) for row in csv.DictReader(file)]
    assert curve[:3] == [("both", "0", "1", "0.500000"), ("both", "0", "2", "1.000000"), ("both", "1", "1", "0.500000")]
    assert len(curve) == 8
    again, same = run_choosing(tmp_path, monkeypatch, tree)
    assert (again, same) == ([], table)


def test_a_setting_with_which_training_diverges_is_not_chosen(tree, tmp_path, monkeypatch):
    class Diverging(PeakedTraining):
        def __call__(self, task, folder, **options):
            if task.recipe.lr >= 8e-3 and task.recipe.bins != 10:
                raise TrainingError("stopped") from NotFiniteError("the loss of step 3 is nan", "")
            return super().__call__(task, folder, **options)

    monkeypatch.setattr(trials, "train_and_evaluate", Diverging())
    task = RetrievalTask(CHOOSING.base, RunContext(tree("omniglot"), CPU))
    changes = {"partial": True, "batch_size": 12}
    table = study.run_study(CHOOSING, task, (0, 1), tmp_path, changes=changes)
    assert re.search(r"^\| both .* lr=0\.008 bins=10 \|", table, re.MULTILINE)
    monkeypatch.setattr(trials, "train_and_evaluate", Diverging())
    table = study.run_study(CHOOSING, task, (0, 1), tmp_path / "b", changes={**changes, "bins": 20}, only="fixed")
    assert re.search(r"^\| fixed +\| 2 diverged \|", table, re.MULTILINE)
    with (tmp_path / "b" / "choosing.csv").open(newline="") as file:
        assert [row["seed"] for row in csv.DictReader(file)] == ["0", "1"]

    def broken(*_, **options):
        raise TrainingError("the disk is full")

    monkeypatch.setattr(trials, "train_and_evaluate", broken)
    with pytest.raises(TrainingError, match="disk"):
        study.run_study(CHOOSING, task, (0,), tmp_path / "c", changes=changes)


def test_a_sweep_does_not_choose_what_diverges(tmp_path, monkeypatch):
    class Diverging(FakeTraining):
        def __call__(self, task, folder, **options):
            if task.recipe.lr == 0.2 and task.recipe.seed == 1:
                raise TrainingError("stopped") from NotFiniteError("the loss of step 3 is nan", "")
            return super().__call__(task, folder, **options)

    found = run_sweep(tmp_path, Diverging(), monkeypatch)
    assert found.chosen == {"lr": 0.3}
    assert re.search(r"\| lr=0\.2 +\| 70\.0, 1 diverged \|", found.report())


def test_the_command_line_decides_what_a_study_would_choose(tree, tmp_path, monkeypatch):
    runs, _ = run_choosing(tmp_path, monkeypatch, tree, changes={"lr": 2e-3}, only="both")
    assert {lr for _, lr, *_ in runs} == {2e-3}
    assert [bins for split, _, bins, *_ in runs if split == "test"] == [20, 20]


def test_a_study_stops_between_runs_and_a_second_call_continues(tree, tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 60))
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    first, text = run_choosing(tmp_path, monkeypatch, tree, minutes=8.5)
    assert "stopped after 8.5 minutes: 3 tests are missing; the same command continues" in text
    assert [split for split, *_ in first].count("test") == 1
    assert "| both" in text
    second, text = run_choosing(tmp_path, monkeypatch, tree, minutes=8.5)
    assert "missing" not in text
    assert len(first) + len(second) == 10
    assert not set(first) & set(second)


def test_out_of_time_a_study_still_shows_what_the_ledger_has(tree, tmp_path, monkeypatch):
    run_choosing(tmp_path, monkeypatch, tree, only="fixed")
    runs, text = run_choosing(tmp_path, monkeypatch, tree, minutes=1e-9)
    assert runs == []
    assert "| fixed" in text
    assert "| both" not in text
    assert "2 tests are missing" in text


def test_shares_of_a_study_run_every_line_once(tree, tmp_path, monkeypatch):
    whole, table = run_choosing(tmp_path / "whole", monkeypatch, tree)
    shares = []
    for number in range(2):
        runs, text = run_choosing(tmp_path / "shared", monkeypatch, tree, share=(number, 2))
        shares.append(runs)
    assert sorted(shares[0] + shares[1]) == sorted(whole)
    assert all(shares)
    # the second share shows what the first one left in the ledger
    assert text == table
    nothing, text = run_choosing(tmp_path / "none", monkeypatch, tree, share=(0, 0))
    assert nothing == []
    assert "4 tests are missing; the same command continues" in text


def test_lines_with_the_same_settings_are_of_one_share(tree, tmp_path, monkeypatch):
    ran = []

    def training(task, run, **options):
        ran.append(json.dumps(task.recipe.settings()))
        return TrialResult({"test": dict.fromkeys(STUDIES["omniglot"].metrics, 0.5)}, 2.0)

    monkeypatch.setattr(trials, "train_and_evaluate", training)
    chosen = STUDIES["omniglot"]
    task = RetrievalTask(chosen.base, RunContext(tree("omniglot"), CPU))
    found = []
    for number in range(3):
        ran.clear()
        folder = tmp_path / str(number)
        study.run_study(chosen, task, (0,), folder, changes={"partial": True}, only="FastAPLoss", share=(number, 3))
        found.append(set(ran))
    assert not found[0] & found[1]
    assert not found[0] & found[2]
    assert not found[1] & found[2]
    assert all(found)


def test_a_key_knows_weights_by_their_content(tmp_path):
    (tmp_path / "a").write_bytes(b"weights")
    (tmp_path / "b").write_bytes(b"weights")
    (tmp_path / "c").write_bytes(b"other weights")
    keys = [key_of(replace(RECIPE, weights=str(tmp_path / name)), "test") for name in "abc"]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]
    # replaced in its place
    (tmp_path / "a").write_bytes(b"other weights")
    assert key_of(replace(RECIPE, weights=str(tmp_path / "a")), "test") == keys[2]
    assert key_of(replace(RECIPE, weights="none"), "test") not in keys


def test_processes_share_a_ledger(tmp_path):
    entries = [Entry(key, "group", "label", {}, 0, "test", {"R@1": 0.5}, 2.0) for key in "abc"]
    one, other = Ledger(tmp_path / "ledger.jsonl"), Ledger(tmp_path / "ledger.jsonl")
    one.add(entries[0])
    assert other.get("a") == entries[0]
    other.add(entries[1])
    one.add(entries[2])
    # a third one, opened after a crash in the middle of a line
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"key": "d", "gro')
    third = Ledger(tmp_path / "ledger.jsonl")
    third.add(replace(entries[0], key="e"))
    for ledger in (one, other, third):
        assert [ledger.get(key) is not None for key in "abcde"] == [True, True, True, False, True]
        assert len(ledger) == 4


def test_jobs_run_shares_and_show_the_whole_table(tree, tmp_path, monkeypatch, capsys):
    commands = []

    class InThisProcess:
        def __init__(self, command, **options):
            commands.append(command)
            self.returncode = cli.main(command[3:])

        def poll(self):
            return self.returncode

    monkeypatch.setattr(trials, "train_and_evaluate", PeakedTraining())
    monkeypatch.setattr("rankgrad.recipes.studies.STUDIES", {"choosing": CHOOSING})
    monkeypatch.setattr("subprocess.Popen", InThisProcess)
    common = ["--data", str(tree("omniglot")), "--partial", "--batch-size", "12", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.main(["study", "choosing", "--jobs", "2", *common, "--cache", "none"]) == 0
    assert [command[-2:] for command in commands] == [["--share", "1/2"], ["--share", "2/2"]]
    shown = capsys.readouterr().out.rpartition("runs are finished")[2] or ""
    assert "| both" in shown
    assert "| fixed" in shown
    assert "missing" not in shown.rpartition("| both")[2]
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: SimpleNamespace(poll=lambda: -9, returncode=-9))
    assert cli.main(["study", "choosing", "--jobs", "2", *common, "--cache", "none"]) == 9
    assert "process 1 ended with status -9" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "a/b", "1/"])
def test_a_share_is_one_of_several(text, capsys):
    assert cli.main(["study", "cars", "--share", text]) == 2
    assert f"--share must be of the form 2/4, the second of four shares, got {text!r}" in capsys.readouterr().err


def test_intervals_are_those_of_all_runs_or_none():
    entries = [
        Entry("a", "g", "l", {}, 0, "test", {"R@1": 0.5}, 1.0, {"R@1": (0.4, 0.6)}),
        Entry("b", "g", "l", {}, 1, "test", {"R@1": 0.5}, 1.0, {"R@1": (0.44, 0.64)}),
    ]
    assert with_interval("50.0", entries, "R@1") == "50.0 [42.0, 62.0]"
    assert with_interval("50.0", [*entries, replace(entries[0], intervals={})], "R@1") == "50.0"
    assert curves_as_csv(entries) == "group,label,changes,seed,split,epoch\n"


def test_a_real_sweep_in_miniature(tree, tmp_path, capsys):
    command = ["sweep", "omniglot-fastap", "--data", str(tree("omniglot")), "--debug", "--out", str(tmp_path / "s")]
    options = ["--grid", "bins=5,10", "--seeds", "0,1", "--device", "cpu", "--cache", "none"]
    assert cli.main([*command, *options]) == 0
    out = capsys.readouterr().out
    assert out.count("validation: bins=") == 4
    assert out.count("test: bins=") == 2
    entries = [json.loads(line) for line in (tmp_path / "s" / "ledger.jsonl").read_text().splitlines()]
    assert [entry["split"] for entry in entries] == ["validation"] * 4 + ["test"] * 2
    assert all(0 <= entry["metrics"]["R@1"] <= 1 for entry in entries)
    # half of the six classes trained in validation runs, all of them in test runs
    for folder, classes in (("validation-bins=5-seed=0", 3), (f"test-{entries[-1]['label']}-seed=1", 6)):
        start = json.loads((tmp_path / "s" / "runs" / folder / "journal.jsonl").read_text().splitlines()[0])
        assert start["data"]["train"]["classes"] == classes


def test_a_real_study_in_miniature(tree, tmp_path, capsys):
    command = ["study", "omniglot", "--data", str(tree("omniglot")), "--debug", "--only", "sampling", "--device", "cpu"]
    assert cli.main([*command, "--out", str(tmp_path), "--csv", str(tmp_path / "x" / "table.csv"), "--cache", "none"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\| FastAPLoss, category-hard +\|( +[\d.]+ \|){4} +[\d.]+ m?s \|$", out, re.MULTILINE)
    with (tmp_path / "x" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["changes"].split("sampler=")[1].split()[0] for row in rows] == [
        "class-balanced",
        "whole-class",
        "category-hard",
    ] * 2
    assert (tmp_path / "x" / "table.md").exists()
    assert out.count("note: partial copy") == 1, "a note is printed once, however many runs it concerns"


def test_a_real_study_that_chooses_in_miniature(tree, tmp_path, capsys):
    command = ["study", "cars", "--data", str(tree("cars")), "--debug", "--only", "SmoothAPLoss", "--out", str(tmp_path)]
    assert cli.main([*command, "--lr", "1e-3", "--device", "cpu", "--cache", "none"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^\| SmoothAPLoss +\|( +[\d.]+ \[[\d.]+, [\d.]+\] +\|){5} tau=0\.\d+ \| +[\d.]+ m?s \|$", out, re.MULTILINE
    )
    with (tmp_path / "cars.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["split"], row["changes"].split()[-1]) for row in rows[:2]] == [
        ("validation", "tau=0.01"),
        ("validation", "tau=0.03"),
    ]
    with (tmp_path / "cars-curves.csv").open(newline="") as file:
        curve = list(csv.DictReader(file))
    # the last point is that of the table, and it was not computed twice
    assert curve[-1]["R@1"] == rows[-1]["R@1"]
    assert out.count("evaluating test") == len(curve)
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert not any((run / "checkpoints").exists() for run in runs)
