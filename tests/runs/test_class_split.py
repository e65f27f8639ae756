"""How classes without a split are divided, how a run remembers it, and batches that a part of the classes can fill."""

import json
from dataclasses import replace

import fake_datasets
import numpy as np
import pytest
import torch

from rankgrad import cli
from rankgrad.recipes.catalogue import find
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.sweep import run_sweep
from rankgrad.runs.task import RunContext

CPU = torch.device("cpu")
QUIET = ["--device", "cpu", "--cache", "none", "--no-tensorboard"]


@pytest.fixture
def classes(tmp_path):
    """Ten classes of six images, without a split."""
    root = tmp_path / "images"
    for label in range(10):
        for example in range(6):
            fake_datasets.save(root / f"class-{label}" / f"{example}.png", label, example, 0)
    return root


def train(*arguments):
    return cli.main(["train", *map(str, arguments), *QUIET])


def train_classes(recipe, data):
    table = RetrievalTask(recipe, RunContext(data, CPU)).data.table(recipe, "train")
    return {path.split("/")[0] for path in table.paths}


def test_a_run_records_its_split_and_keeps_it(classes, tmp_path, capsys):
    run = tmp_path / "run"
    assert train("own-images", "--data", classes, "--debug", "--out", run, "--split-seed", 3) == 0
    assert "5 classes train (drawn at random with seed 3), the other 5 test" in capsys.readouterr().out
    recipe = RunFolder(run).read_recipe(RetrievalRecipe)
    assert recipe.split_seed == 3
    assert train_classes(recipe, classes) != {f"class-{i}" for i in range(5)}
    assert train("--resume", run, "--split-seed", 4) == 2
    assert "--split-seed was 3 and is 4" in capsys.readouterr().err


def test_a_run_from_before_random_splits_goes_on_with_its_own(classes, tmp_path, capsys):
    run = tmp_path / "run"
    command = ("own-images", "--data", classes, "--debug", "--out", run, "--split-seed", "alphabetical")
    assert train(*command, "--epochs", 1, "--schedule", "constant") == 0
    # as older versions wrote it
    path = run / "recipe.json"
    content = json.loads(path.read_text())
    for name in ("split_seed", "image_root"):
        del content["settings"][name]
    path.write_text(json.dumps(content))
    recipe = RunFolder(run).read_recipe(RetrievalRecipe)
    assert recipe.split_seed == "alphabetical"
    assert "split_seed" not in recipe.identity(), "older checkpoints do not name it"
    assert train_classes(recipe, classes) == {f"class-{i}" for i in range(5)}
    capsys.readouterr()
    assert train("--resume", run, "--epochs", 2) == 0
    assert "5 classes train (the first by name)" in capsys.readouterr().out


def test_validation_classes_are_drawn_at_random_too(classes):
    recipe = replace(find("own-images").debug_version(), validation="half")
    halves = {}
    for seed in (0, 1, "alphabetical"):
        task = RetrievalTask(replace(recipe, split_seed=seed), RunContext(classes, CPU))
        train, validation = task.data.training(task.recipe)
        halves[seed] = frozenset(train.labels.tolist()), frozenset(validation.labels.tolist())
        assert not halves[seed][0] & halves[seed][1]
    assert max(halves["alphabetical"][0]) < min(halves["alphabetical"][1])
    assert max(halves[0][0]) > min(halves[0][1]) or max(halves[1][0]) > min(halves[1][1])
    assert halves[0] != halves[1]


def test_published_data_sets_keep_the_order_of_their_labels(tree):
    recipe = replace(find("sop-recall-at-k").debug_version(), validation="half")
    train, validation = RetrievalTask(recipe, RunContext(tree("sop"), CPU)).data.training(recipe)
    assert train.labels.max() < validation.labels.min()


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        ({"batch_size": 20, "per_class": 4}, 12),
        ({"batch_size": 12, "per_class": 4}, 12),
        ({"batch_size": 0, "per_class": 4}, 0),
        ({"sampler": "whole-class", "batch_size": 30}, 18),
    ],
)
def test_a_batch_that_a_part_of_the_classes_cannot_fill_is_lowered(classes, settings, batch, capsys):
    recipe = replace(find("own-images").debug_version(), validation="half", **settings)
    task = RetrievalTask(recipe, RunContext(classes, CPU)).for_selection()
    assert task.recipe.batch_size == batch
    said = capsys.readouterr().out
    assert (f"batches have {batch} images instead of" in said) == (batch != settings["batch_size"])
    assert len(task.make_batches()) > 0


def test_a_sweep_validates_with_a_batch_that_fits(classes, tmp_path, capsys):
    recipe = replace(find("own-images").debug_version(), batch_size=20, per_class=4, epochs=1)
    task = RetrievalTask(recipe, RunContext(classes, CPU))
    run_sweep(task, {"lr": (1e-3, 1e-4)}, (0,), tmp_path / "sweep")
    assert capsys.readouterr().out.count("batches have 12 images instead of 20") == 1
    sizes = {
        path.parent.name.split("-")[0]: json.loads(path.read_text())["settings"]["batch_size"]
        for path in (tmp_path / "sweep" / "runs").glob("*/recipe.json")
    }
    assert sizes == {"validation": 12, "test": 20}


def test_classes_too_small_to_sample_are_mentioned(classes):
    for example in range(3, 6):
        (classes / "class-1" / f"{example}.png").unlink()
        (classes / "class-2" / f"{example}.png").unlink()
    recipe = replace(find("own-images").debug_version(), per_class=4, batch_size=8, split_seed="alphabetical")
    notes = RetrievalTask(recipe, RunContext(classes, CPU)).notes()
    assert "2 classes have fewer than 4 training images and are not sampled: see --per-class" in notes


def test_a_run_on_a_list_of_absolute_paths(classes, tmp_path, capsys):
    rows = [f"{path},{path.parent.name}" for path in sorted(classes.rglob("*.png"))]
    listed = tmp_path / "list.csv"
    listed.write_text("path,label\n" + "\n".join(rows) + "\n")
    command = ("own-images", "--data-set", "csv", "--data", listed, "--debug", "--out", tmp_path / "run")
    assert train(*command) == 2
    assert "--image-root DIR" in capsys.readouterr().err
    assert train(*command, "--image-root", classes) == 0
    assert np.load(tmp_path / "run" / "eval" / "test" / "embeddings.npy").shape[0] == 30
    # the images and their list move together
    moved = classes.rename(tmp_path / "moved")
    listed.write_text(listed.read_text().replace(str(classes), str(moved)))
    command = ["eval", str(tmp_path / "run"), "--image-root", str(moved), "--device", "cpu", "--cache", "none"]
    assert cli.main(command) == 0
    # where they are makes no other result
    assert [path.name for path in (tmp_path / "run" / "eval").iterdir() if path.is_dir()] == ["test"]


def test_a_run_finds_the_images_of_its_list_from_any_folder(classes, tmp_path, monkeypatch):
    listed, run = tmp_path / "list.csv", tmp_path / "run"
    rows = [f"{path.relative_to(classes)},{path.parent.name}" for path in sorted(classes.rglob("*.png"))]
    listed.write_text("path,label\n" + "\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    command = ("own-images", "--data-set", "csv", "--data", "list.csv", "--image-root", classes.name, "--debug", "--out", "run")
    assert train(*command, "--epochs", 1, "--schedule", "constant") == 0
    assert RunFolder(run).read_recipe(RetrievalRecipe).image_root == str(classes)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["eval", str(run), "--device", "cpu", "--cache", "none"]) == 0
    assert train("--resume", run, "--epochs", 2) == 0
    # a folder that is named again, from here
    assert train("--resume", run, "--epochs", 3, "--image-root", f"../{classes.name}") == 0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", str(run), "--device", "cpu", "--cache", "none"]) == 0
