"""Who may write to a run's folder, what a resumed run is compared with, and that no result replaces another."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rankgrad import cli
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder

QUIET = ["--device", "cpu", "--cache", "none", "--no-tensorboard"]


def train(*arguments: object) -> int:
    return cli.main(["train", *map(str, arguments), *QUIET])


def evaluate(*arguments: object) -> int:
    return cli.main(["eval", *map(str, arguments), "--device", "cpu", "--cache", "none"])


def result(run: Path, key: str) -> dict:
    return json.loads((run / "eval" / key / "result.json").read_text())


def last_weights(run: Path) -> bytes:
    folder = json.loads((run / "checkpoints" / "last.json").read_text())["folder"]
    return (run / "checkpoints" / folder / "weights.safetensors").read_bytes()


def with_data(run: Path, data: Path) -> Path:
    """The run, as if it had been started on `data`."""
    content = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**content, "data": str(data)}))
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Own images with a split, six training and four test classes, and a run that can go on for another epoch."""
    place = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    root = place / "images"
    for split, classes in (("train", 6), ("test", 4)):
        for name in range(classes):
            for number in range(4):
                path = root / split / f"{split}-{name}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    assert train("--data", root, "--debug", "--schedule", "constant", "--epochs", 1, "--out", place / "run") == 0
    return place


@pytest.fixture
def images(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "images", tmp_path / "images"))


@pytest.fixture
def half(made, images, tmp_path) -> Path:
    return with_data(Path(shutil.copytree(made / "run", tmp_path / "run")), images)


# --- locks


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_folder_is_refused_with_the_process_of_the_first(half, images, tmp_path, capsys, resume):
    folder = half if resume else tmp_path / "new"
    arguments = ["--resume", folder, "--epochs", 2] if resume else ["--data", images, "--debug", "--out", folder]
    with RunFolder(folder).training():
        assert train(*arguments) != 0
        told = capsys.readouterr().err
        assert f"{folder} is in use: a run is being trained in it by process {os.getpid()}" in told
    assert train(*arguments) == 0
    assert not (folder / "lock").exists()


def test_two_evaluations_at_once_are_refused_and_one_beside_training_is_not(half, capsys):
    with RunFolder(half).evaluating():
        assert evaluate(half) != 0
        assert f"it is being evaluated by process {os.getpid()}" in capsys.readouterr().err
    with RunFolder(half).training():
        assert evaluate(half) == 0


def test_the_lock_of_a_killed_process_does_not_block(half):
    code = (
        "import sys, time\nfrom rankgrad.runs.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).training(), RunFolder(sys.argv[1]).evaluating():\n"
        "    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(half)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert train("--resume", half, "--epochs", 2) != 0
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (half / "lock").is_file(), "a killed process leaves its file"
    assert train("--resume", half, "--epochs", 2) == 0
    assert evaluate(half) == 0


def test_the_lock_file_of_another_host_that_nobody_holds_does_not_block(half):
    for lock in (half / "lock", half / "eval" / "lock"):
        lock.write_text(json.dumps({"pid": 1, "host": "another.example"}))
    assert train("--resume", half, "--epochs", 2) == 0


def test_two_runs_started_together_do_not_report_each_others_numbers(images, tmp_path):
    out = tmp_path / "both"
    commands = [
        [sys.executable, "-m", "rankgrad.cli", "train", "--data", images, "--debug", "--out", out, "--loss", loss, *QUIET]
        for loss in ("fastap", "smooth-ap")
    ]
    runs = [subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [run.communicate()[1] for run in runs]
    codes = [run.returncode for run in runs]
    assert min(codes) == 0
    assert max(codes) != 0
    refused = errors[codes.index(max(codes))]
    assert "is in use" in refused or "already exists and is not empty" in refused
    assert json.loads((out / "recipe.json").read_text())["settings"]["loss"] == ("fastap", "smooth-ap")[codes.index(0)]


# --- changed data


def remove(images: Path) -> None:
    shutil.rmtree(images / "train" / "train-2")


def rename(images: Path) -> None:
    (images / "train" / "train-2").rename(images / "train" / "zebra")


def add(images: Path) -> None:
    shutil.copytree(images / "train" / "train-2", images / "train" / "zebra")


def replace_image(images: Path) -> None:
    Image.new("RGB", (40, 40)).save(images / "train" / "train-2" / "1.png")


def move(images: Path) -> None:
    (images / "train" / "train-2" / "1.png").rename(images / "train" / "train-3" / "moved.png")


def test_to_train(images: Path) -> None:
    (images / "test" / "test-1").rename(images / "train" / "test-1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, "train: 1 class removed (train-2)"),
        (rename, "train: 1 class renamed ('train-2' to 'zebra')"),
        (add, "train: 1 class added (zebra)"),
        (replace_image, "train: images replaced in 1 class (train-2)"),
        (move, "train: images removed in 1 class (train-2); images added in 1 class (train-3)"),
        (test_to_train, "train: 1 class added (test-1). test: 1 class removed (test-1)"),
    ],
)
def test_a_run_is_not_resumed_on_changed_data(half, images, capsys, change, message):
    before = last_weights(half), (half / "recipe.json").read_text()
    change(images)
    assert train("--resume", half, "--epochs", 2) == 2
    told = capsys.readouterr().err
    assert f"the data has changed since {half} was started ({message}): restore it, or start a new run" in told
    assert (last_weights(half), (half / "recipe.json").read_text()) == before


def test_a_moved_data_set_is_the_same_data(half, images, tmp_path):
    moved = images.rename(tmp_path / "elsewhere")
    assert train("--resume", half, "--epochs", 2, "--data", moved) == 0


def test_a_run_saved_without_fingerprints_resumes_with_a_note(half, capsys):
    (half / "data.json").unlink()
    content = json.loads((half / "recipe.json").read_text())
    del content["task"]
    (half / "recipe.json").write_text(json.dumps(content))
    assert train("--resume", half, "--epochs", 2) == 0
    assert "was saved without fingerprints of its data" in capsys.readouterr().out
    assert RunFolder(half).read_data_identity()["train"].items == 24


FIRST_SETTINGS = [
    "data_set",
    "test_on",
    "partial",
    "skip_bad",
    "classes",
    "images_per_class",
    "size",
    "stored_side",
    "decode",
    "aspect",
    "crop",
    "crop_scale",
    "flip",
    "sampler",
    "batch_size",
    "per_class",
    "batches_per_pair",
    "trunk",
    "weights",
    "pool",
    "gem_p",
    "gem_learned",
    "l2_pooled",
    "layer_norm",
    "dim",
    "batch_norm",
    "pixels",
    "whiten",
    "loss",
    "bins",
    "lam",
    "margin",
    "weighting",
    "tau",
    "tau_cut",
    "ks",
    "query_in_database",
    "simix",
    "memory",
    "optimizer",
    "lr",
    "head_lr",
    "gem_lr",
    "weight_decay",
    "decay_norms",
    "decay_gem",
    "schedule",
    "milestones",
    "gamma",
    "warmup",
    "warmup_steps",
    "epochs",
    "steps",
    "clip",
    "precision",
    "compile",
    "cuda_graphs",
    "channels_last",
    "chunk_size",
    "keep",
    "validation",
    "evaluate_every",
    "patience",
    "scales",
    "seed",
    "checkpoint_every",
    "log_every",
]


def test_a_setting_that_older_runs_lack_does_not_keep_them_from_resuming(half):
    content = json.loads((half / "recipe.json").read_text())
    content["settings"] = {name: value for name, value in content["settings"].items() if name in FIRST_SETTINGS}
    (half / "recipe.json").write_text(json.dumps(content))
    recipe = RunFolder(half).read_recipe(RetrievalRecipe)
    assert set(recipe.identity()) <= set(FIRST_SETTINGS), "give the new ones a value in `before_setting`"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split_seed", "alphabetical"),
        ("train_side", 64),
        ("tau_end", 0.5),
        ("proxy_weight", 0.1),
        ("proxy_temperature", 0.1),
        ("rho", 3.0),
        ("delta", 0.5),
        ("loss_lr", 2.0),
        ("label_column", "kind"),
    ],
)
def test_a_change_of_a_setting_that_older_runs_lack_is_refused(half, capsys, name, value):
    before, flag = (half / "recipe.json").read_text(), f"--{name.replace('_', '-')}"
    saved = getattr(RunFolder(half).read_recipe(RetrievalRecipe), name)
    assert train("--resume", half, "--epochs", 2, flag, value) == 2
    told = capsys.readouterr().err
    # the command line names settings of two words as flags
    shown = flag if "_" in name else name
    assert f"{half} was started differently (" in told
    assert f"{shown} was {saved!r} and is {value!r}" in told
    assert (half / "recipe.json").read_text() == before


def test_settings_that_the_loop_accepts_do_not_keep_the_data_from_being_checked(half, images, capsys):
    # as if the run had been resumed with another setting and killed before its first step
    path = half / "recipe.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "settings": {**content["settings"], "rho": 3.0}}))
    remove(images)
    assert train("--resume", half, "--epochs", 2, "--rho", 100) == 2
    assert f"the data has changed since {half} was started" in capsys.readouterr().err
    # settings that may be why the data differs are named in its place
    assert train("--resume", half, "--epochs", 2, "--rho", 100, "--classes", 3) == 2
    assert "classes was 12 and is 3" in capsys.readouterr().err


def test_an_identity_survives_its_file_and_names_few_of_many_classes():
    def identity(classes):
        return DataIdentity.of(str(classes), [(f"c{i}", f"c{i}/{j}.jpg", str(i)) for i in classes for j in range(2)])

    one, other = identity(range(10)), identity(range(5, 20))
    assert DataIdentity.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    assert one.changes(one) == []
    assert one.changes(other) == [
        "5 classes removed (c0, c1, c2 and 2 more)",
        "10 classes added (c10, c11, c12 and 7 more)",
    ]


# --- results


def test_other_data_does_not_replace_the_runs_own_result(half, images, tmp_path):
    own = (half / "eval" / "test" / "result.json").read_bytes()
    other = tmp_path / "other"
    shutil.copytree(images, other)
    shutil.rmtree(other / "test" / "test-3")
    assert evaluate(half, "--data", other) == 0
    assert (half / "eval" / "test" / "result.json").read_bytes() == own
    (key,) = {path.parent.name for path in half.glob("eval/*/result.json")} - {"test"}
    content, first = result(half, key), result(half, "test")
    assert key == f"test@other-{content['data']['fingerprint'][:8]}"
    assert content["data"] == {"path": str(other), "fingerprint": content["data"]["fingerprint"], "own": False}
    assert first["data"]["own"] is True
    assert first["data"]["fingerprint"] != content["data"]["fingerprint"]
    assert first["checkpoint"] == {"name": "last", "step": content["checkpoint"]["step"]}
    assert content["split"] == first["split"] == "test"
    # the same data elsewhere is the run's own
    same = tmp_path / "same"
    shutil.copytree(images, same)
    assert evaluate(half, "--data", same) == 0
    assert {path.parent.name for path in half.glob("eval/*/result.json")} == {"test", key}


def test_classes_are_named_in_the_run(half):
    names = json.loads((half / "recipe.json").read_text())["class_names"]
    assert sorted(names["train"].values()) == [f"train-{i}" for i in range(6)]
    lines = (half / "eval" / "test" / "table.csv").read_text().splitlines()
    assert lines[0].split(",")[-1] == "class"
    assert {line.split(",")[-1] for line in lines[1:]} == {f"test-{i}" for i in range(4)}


def test_a_result_that_cannot_be_saved_is_printed_first(half, capsys, monkeypatch):
    from rankgrad.runs import tester

    def refuse(*_, **__):
        raise PermissionError(13, "Read-only file system")

    before = (half / "eval" / "test" / "result.json").read_bytes()
    monkeypatch.setattr(tester, "atomic_folder", refuse)
    assert evaluate(half) != 0
    told = capsys.readouterr()
    assert "R@1" in told.out
    assert f"the result could not be saved: {half / 'eval' / 'test'}: Read-only file system" in told.err
    assert (half / "eval" / "test" / "result.json").read_bytes() == before


def test_what_a_killed_evaluation_left_is_removed_by_the_next(half):
    code = (
        "import os, sys\nfrom rankgrad import cli\nfrom rankgrad.runs.retrieval_evaluation import RetrievalEvaluation\n"
        "write = RetrievalEvaluation.write\n"
        "def killed(self, folder, extra):\n    write(self, folder, extra)\n    os.kill(os.getpid(), 9)\n"
        "RetrievalEvaluation.write = killed\n"
        "cli.main(['eval', sys.argv[1], '--device', 'cpu', '--cache', 'none'])"
    )
    before = (half / "eval" / "test" / "result.json").read_bytes()
    subprocess.run([sys.executable, "-c", code, str(half)], check=False, capture_output=True)
    left = [path.name for path in (half / "eval").iterdir() if path.name.startswith(".")]
    assert left, "nothing was left to remove"
    assert (half / "eval" / "test" / "result.json").read_bytes() == before, "the old result is whole until the new one is"
    assert evaluate(half) == 0
    assert [path.name for path in half.rglob(".*")] == []


# --- the untrained network


def test_a_run_of_0_epochs_tests_the_untrained_network_and_can_be_trained_later(images, tmp_path, capsys):
    command = ("--data", images, "--debug", "--schedule", "constant")
    assert train(*command, "--epochs", 0, "--out", tmp_path / "zero") == 0
    assert "R@1" in capsys.readouterr().out
    assert result(tmp_path / "zero", "test")["checkpoint"] == {"name": "last", "step": 0}
    assert evaluate(tmp_path / "zero") == 0
    assert train("--resume", tmp_path / "zero", "--epochs", 1) == 0
    assert train(*command, "--epochs", 1, "--out", tmp_path / "one") == 0
    assert last_weights(tmp_path / "zero") == last_weights(tmp_path / "one")


def test_the_untrained_network_is_compared_with_where_that_is_cheap(images, tmp_path, capsys):
    command = ("--data", images, "--debug", "--schedule", "constant", "--images-per-class", 2, "--per-class", 2)
    settings = ("--batch-size", 6, "--lr", "1e-9")
    assert train(*command, *settings, "--epochs", 20, "--out", tmp_path / "long") == 0
    told = capsys.readouterr().out
    assert "testing the untrained network, to compare with" in told
    assert result(tmp_path / "long", "test@untrained")["checkpoint"] == {"name": "untrained", "step": 0}
    header = next(line.split() for line in told.splitlines() if line.startswith("split"))
    assert header[:4] == ["split", "metric", "untrained", "got"]
    # training was not touched by it
    assert train(*command, *settings, "--epochs", 1, "--out", tmp_path / "short") == 0
    assert not (tmp_path / "short" / "eval" / "test@untrained").exists()
    assert evaluate(tmp_path / "short", "--checkpoint", "untrained") == 0
    one, other = (np.load(tmp_path / run / "eval" / "test@untrained" / "embeddings.npy") for run in ("long", "short"))
    assert np.array_equal(one, other)
    assert train("--resume", tmp_path / "short", "--epochs", 20) == 0
    assert last_weights(tmp_path / "short") == last_weights(tmp_path / "long")


def test_data_that_moved_is_asked_for(half, images, tmp_path, capsys):
    shutil.move(images, tmp_path / "elsewhere")
    for command in (["train", "--resume", str(half), *QUIET], ["eval", str(half), "--device", "cpu"]):
        assert cli.main(command) == 2
        assert f"the data of {half} is no longer in {images}: say where it is with --data DIR" in capsys.readouterr().err
    assert evaluate(half, "--data", tmp_path / "elsewhere") == 0
