"""A folder to share: it opens anywhere, without the data, gives the same embeddings to the last bit, and tells no paths."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rankgrad as rg
from rankgrad import cli
from rankgrad.models.weights import read_weights
from rankgrad.recipes.catalogue import find
from rankgrad.runs.pipeline import start_run
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.search import load
from rankgrad.search.sharing import share


@pytest.fixture(scope="module")
def shared(run_folder, tmp_path_factory) -> Path:
    """What `rankgrad card` wrote, moved to another place."""
    folder = tmp_path_factory.mktemp("out") / "model"
    assert cli.main(["card", str(run_folder), "--out", str(folder), "--license", "cc-by-4.0"]) == 0
    return Path(shutil.move(folder, tmp_path_factory.mktemp("elsewhere") / "moved"))


def test_the_same_embeddings_bit_for_bit_in_another_place_without_data(shared, run_folder, data, trained, tmp_path):
    images = shutil.copytree(data / "test", tmp_path / "images")
    hidden, run_hidden = data.rename(data.with_name("hidden-data")), run_folder.rename(run_folder.with_name("hidden-run"))
    script = "import sys, numpy, rankgrad as rg; numpy.save(sys.argv[2], rg.load('moved', 'cpu').embed(sys.argv[1]))"
    try:
        command = [sys.executable, "-c", script, str(images), str(tmp_path / "found.npy")]
        subprocess.run(command, cwd=shared.parent, check=True)
    finally:
        hidden.rename(data)
        run_hidden.rename(run_folder)
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), trained.embed(data / "test"))


def test_it_is_the_model_of_the_run(shared, trained):
    model = rg.load(shared, "cpu")
    assert (model.fingerprint, model.step, model.checkpoint) == (trained.fingerprint, trained.step, trained.checkpoint)
    assert model.recipe == trained.recipe
    for one, other in zip(model.model.state_dict().values(), trained.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_it_holds_what_others_need_and_no_path_of_this_machine(shared, run_folder, data):
    names = {path.relative_to(shared).as_posix() for path in shared.rglob("*") if path.is_file()}
    assert names == {
        *("README.md", "model.safetensors", "manifest.json", "recipe.json", "data.json", "model.json", "preprocess.py"),
        *("model.onnx", "eval/test/result.json"),
    }
    for path in shared.rglob("*"):
        for place in (data, run_folder, Path(rg.__file__).parent, Path.home()):
            assert path.is_dir() or bytes(place) not in path.read_bytes(), (path, place)
    assert json.loads((shared / "recipe.json").read_text())["class_names"]["test"]


def test_every_command_takes_it(shared, data, gallery, tmp_path, capsys):
    test, image = str(data / "test"), str(data / "test" / "class-006" / "1.png")
    emb = str(tmp_path / "emb")
    assert cli.main(["embed", str(shared), test, "--out", emb, "--device", "cpu"]) == 0
    np.testing.assert_array_equal(np.load(f"{emb}/embeddings.npy"), gallery.embeddings)
    # embeddings that the run made are of the same weights
    for folder in (emb, str(gallery.folder)):
        assert cli.main(["search", image, "--index", folder, "--run", str(shared), "-k", "2", "--device", "cpu"]) == 0
        assert "class-006" in capsys.readouterr().out
    assert cli.main(["predict", str(shared), image, "--gallery", emb, "-k", "3", "--device", "cpu"]) == 0
    assert "path,label,agreement,score,nearest" in capsys.readouterr().out
    assert cli.main(["export", str(shared), "--out", str(tmp_path / "export")]) == 0
    assert cli.main(["card", str(shared)]) == 0
    assert "library_name: rankgrad" in capsys.readouterr().out
    copy = shutil.copytree(shared, tmp_path / "copy")
    assert cli.main(["eval", str(copy), "--data", str(data), "--device", "cpu", "--cache", "none"]) == 0
    assert "R@1" in capsys.readouterr().out
    before, now = (json.loads((folder / "eval/test/result.json").read_text()) for folder in (shared, copy))
    assert now["metrics"] == before["metrics"]
    assert now["data"]["own"] is True


def test_what_it_cannot_do_is_said(shared, data, tmp_path, capsys):
    assert cli.main(["eval", str(shared), "--device", "cpu"]) == 2
    assert "--data" in capsys.readouterr().err
    assert cli.main(["train", "--resume", str(shared), "--data", str(data), "--device", "cpu"]) == 2
    assert (
        f"without the state of its training: start a new run from its weights with --weights {shared}"
        in capsys.readouterr().err
    )
    with pytest.raises(FileNotFoundError, match="has the last checkpoint of its run, not the best one"):
        load(shared, "cpu", "best")
    copy = shutil.copytree(shared, tmp_path / "copy")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"copy is damaged: model\.safetensors is not what was written"):
        load(copy, "cpu")
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest that this version can read"):
        load(copy, "cpu")
    assert cli.main(["card", str(shared), "--out", str(copy)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err


def test_its_weights_begin_another_training(shared):
    assert read_weights(shared).trunk == "convnet"


def test_a_timm_model_on_disk_travels_with_it(data, tmp_path):
    import timm

    net = tmp_path / "net"
    net.mkdir()
    config = {"architecture": "test_vit", "num_classes": 0, "pretrained_cfg": timm.get_pretrained_cfg("test_vit").to_dict()}
    (net / "config.json").write_text(json.dumps(config))
    recipe = find("own-images").debug_version().with_settings({"trunk": str(net), "size": 160, "stored_side": 0, "epochs": 0})
    start_run(RetrievalTask(recipe, RunContext(data, torch.device("cpu"))), RunFolder(tmp_path / "run"), debug=True)
    before = load(tmp_path / "run", "cpu")
    wanted = before.embed(data / "test")
    share(before, tmp_path / "model", "card", onnx=False)
    shutil.rmtree(net)
    shutil.rmtree(tmp_path / "run")
    np.testing.assert_array_equal(load(tmp_path / "model", "cpu").embed(data / "test"), wanted)
