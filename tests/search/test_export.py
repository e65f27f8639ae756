"""Exported networks give the embeddings of the original, and one that does not is refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rankgrad.cli.search_commands import main_export
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.models import ModelSpec, build_model, embed_multiscale
from rankgrad.models.weights import read_weights
from rankgrad.search import exported_preprocess
from rankgrad.search.export import TOLERANCE, export_model


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return 255 * torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def wanted(trained, pixels) -> torch.Tensor:
    with torch.no_grad():
        return trained.model(pixels)


def test_safetensors_and_the_spec_make_the_model_again(trained, pixels, wanted, tmp_path):
    exported = export_model(trained, "safetensors", tmp_path)
    about = json.loads((tmp_path / "model.json").read_text())
    spec = ModelSpec(**{**about["spec"], "weights": str(tmp_path / about["spec"]["weights"])})
    model = build_model(spec).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), wanted, atol=1e-6, rtol=0)
    assert exported.max_error < 1e-6
    assert (about["dim"], about["size"], about["weights"]) == (16, 32, trained.fingerprint)


def test_torch_export_needs_no_rankgrad_and_takes_any_batch(trained, pixels, wanted, tmp_path):
    exported = export_model(trained, "torch", tmp_path)
    program = torch.export.load(str(exported.path)).module()
    for batch in (1, 5):
        torch.testing.assert_close(program(pixels[:batch]), wanted[:batch], atol=1e-5, rtol=0)
    assert exported.max_error <= TOLERANCE


def test_onnx_takes_any_batch(trained, pixels, wanted, tmp_path):
    import onnxruntime

    exported = export_model(trained, "onnx", tmp_path)
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        (found,) = session.run(None, {"pixels": pixels[:batch].numpy()})
        np.testing.assert_allclose(found, wanted[:batch].numpy(), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.onnx", "preprocess.py"]


def test_scales_are_exported_too(trained, pixels, tmp_path):
    scaled = replace(trained, recipe=replace(trained.recipe, scales=(1.0, 0.5)))
    exported = export_model(scaled, "torch", tmp_path)
    with torch.no_grad():
        wanted = embed_multiscale(scaled.model, pixels, (1.0, 0.5))
        assert (wanted - trained.model(pixels)).abs().max() > 1e-3
        torch.testing.assert_close(torch.export.load(str(exported.path)).module()(pixels), wanted, atol=1e-5, rtol=0)


def test_what_differs_is_not_left_behind(trained, tmp_path, monkeypatch):
    from rankgrad.search import export

    def slightly_off(path, trained):
        model = export._Embedding(trained)
        return lambda pixels: model(pixels) + 1e-3

    monkeypatch.setitem(export._READERS, "safetensors", slightly_off)
    with pytest.raises(ValueError, match=r"model.safetensors differ from the model's by 0.001, more than the 0.0001"):
        export_model(trained, "safetensors", tmp_path)
    monkeypatch.setitem(export._READERS, "safetensors", lambda path, trained: lambda pixels: pixels.mean() * torch.nan)
    with pytest.raises(ValueError, match="differ from the model's by nan"):
        export_model(trained, "safetensors", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command(run_folder, tmp_path, capsys):
    assert main_export([str(run_folder), "--out", str(tmp_path)]) == 0
    assert re.search(r"model.safetensors: 1.6 MB, embeddings within \d.\de.\d\d of the model's", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main_export([str(run_folder), "--format", "keras"])
    assert "invalid choice: 'keras'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="format must be one of 'safetensors', 'torch', 'onnx', got 'tf'"):
        export_model(None, "tf", tmp_path)


def photographs(folder: Path) -> list[Path]:
    """Images of odd sizes, modes and orientations."""
    rng = np.random.default_rng(0)
    made = []
    for number, (width, height) in enumerate([(37, 53), (53, 37), (101, 36), (36, 36), (64, 47), (200, 129), (36, 71)]):
        coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        made.append((image, f"{number}.png", {}))
        exif = Image.Exif()
        exif[0x0112] = 2 + number
        made.append((image, f"{number}.jpg", {"exif": exif, "quality": 95}))
        made.append((image, f"{number}.tif", {"exif": exif}))
    image = made[0][0]
    made += [
        (image.convert("L"), "grey.png", {}),
        (image.convert("P"), "palette.gif", {}),
        (image.convert("RGBA"), "rgba.png", {}),
    ]
    made.append((Image.fromarray(rng.integers(0, 65536, (40, 50)).astype(np.uint16)), "deep.png", {}))
    for picture, name, options in made:
        picture.save(folder / name, **options)
    return [folder / name for _, name, _ in made]


@pytest.mark.parametrize("square", [False, True])
def test_the_exported_preprocessing_gives_the_embeddings_of_embed(trained, tmp_path, square):
    """In a process that has neither rankgrad nor torch."""
    preprocess = replace(trained.preprocess, stored_side=36, square=square)
    model = replace(trained, preprocess=preprocess)
    export_model(model, "onnx", tmp_path)
    (tmp_path / "images").mkdir()
    paths = photographs(tmp_path / "images")
    script = """
import sys, numpy, onnxruntime
from preprocess import preprocess
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
pixels = numpy.concatenate([preprocess(path) for path in sys.argv[1:]])
numpy.save("found.npy", session.run(["embeddings"], {"pixels": pixels})[0])
assert not {"rankgrad", "torch"} & set(sys.modules)
"""
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", script, *map(str, paths)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), model.embed(paths), atol=1e-4)


def test_the_exported_preprocessing_is_the_runs_own_to_the_last_bit(tmp_path):
    for preprocess in (Preprocessing(224), Preprocessing(32, 37), Preprocessing(32, 36, square=True)):
        for path in photographs(tmp_path):
            np.testing.assert_array_equal(exported_preprocess.preprocess(path, preprocess.as_dict())[0], preprocess(path))


def test_exported_weights_say_what_trunk_they_are_of(trained, tmp_path):
    export_model(trained, "safetensors", tmp_path)
    assert read_weights(tmp_path).trunk == "convnet"
