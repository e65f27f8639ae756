"""`rankgrad train`: flags that have no effect are refused, no epochs test the untrained network."""

import json

import pytest
import torch

from rankgrad import cli


def train(*arguments):
    return cli.main(["train", *map(str, arguments), "--device", "cpu", "--cache", "none", "--no-tensorboard"])


@pytest.mark.parametrize("flag", ["--evaluate-every", "--patience"])
def test_evaluation_without_validation_classes_is_refused(tree, tmp_path, capsys, flag):
    common = ("cub-recall-at-k", "--data", tree("cub"), "--debug", "--out", tmp_path / "run", flag, 2)
    with pytest.raises(SystemExit):
        train(*common, "--validation", "none")
    assert f"{flag} needs classes to evaluate on while training: add --validation half" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_no_epochs_test_the_untrained_network(tree, tmp_path):
    run = tmp_path / "run"
    assert train("cub-recall-at-k", "--data", tree("cub"), "--debug", "--epochs", 0, "--out", run) == 0
    assert (run / "eval" / "test" / "result.json").is_file()
    assert json.loads((run / "checkpoints" / "last.json").read_text())["step"] == 0
    assert cli.main(["eval", str(run), "--device", "cpu", "--cache", "none"]) == 0


def test_random_weights_have_their_own_default(tmp_path, monkeypatch):
    (tmp_path / "images" / "one").mkdir(parents=True)
    found = []
    monkeypatch.setattr("rankgrad.runs.pipeline.start_run", lambda task, *args, **options: found.append(task.recipe))
    monkeypatch.setattr("rankgrad.cli.train_commands.steps_after_training", lambda *args: [])
    for flags in ((), ("--weights", "none"), ("--weights", "none", "--lr", 1e-2)):
        assert train("--data", tmp_path / "images", *flags, "--out", tmp_path / "run") == 0
    assert [(recipe.name, recipe.weights, recipe.lr) for recipe in found] == [
        ("own-images", "default", 1e-4),
        ("own-images-scratch", "none", 3e-4),
        ("own-images-scratch", "none", 1e-2),
    ]


def test_a_killed_worker_outside_of_training_is_one_sentence(tree, tmp_path, monkeypatch, capsys):
    def killed(*args, **options):
        raise RuntimeError("DataLoader worker (pid 4021) is killed by signal: Killed. ")

    monkeypatch.setattr("rankgrad.runs.pipeline.start_run", killed)
    assert train("cub-recall-at-k", "--data", tree("cub"), "--debug", "--out", tmp_path / "run") == 2
    assert capsys.readouterr().err == (
        "rankgrad train: a process that loads images has ended (process 4021, killed by signal: Killed), "
        "most often for lack of memory: use fewer --workers\n"
    )


def test_a_model_that_does_not_fit_in_memory_is_one_sentence(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rankgrad.runs.pipeline.start_run", lambda *args, **options: torch.empty(10**15))
    assert train("cub-recall-at-k", "--data", tree("cub"), "--debug", "--out", tmp_path / "run") == 2
    assert capsys.readouterr().err == (
        "rankgrad train: out of memory (3,638.0 TiB more were wanted): "
        "use a smaller --dim, --trunk, --batch-size, --chunk-size or --size\n"
    )
