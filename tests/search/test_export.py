"""Exported networks give the embeddings of the original, and one that does not is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from rankgrad.cli.search_commands import main_export
from rankgrad.models import ModelSpec, build_model
from rankgrad.search.export import TOLERANCE, export_model


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return 255 * torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def wanted(network, pixels) -> torch.Tensor:
    with torch.no_grad():
        return network.model(pixels)


def test_safetensors_and_the_spec_make_the_model_again(network, pixels, wanted, tmp_path):
    exported = export_model(network, "safetensors", tmp_path)
    about = json.loads((tmp_path / "model.json").read_text())
    spec = ModelSpec(**{**about["spec"], "weights": str(tmp_path / about["spec"]["weights"])})
    model = build_model(spec).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), wanted, atol=1e-6, rtol=0)
    assert exported.max_error < 1e-6
    assert (about["dim"], about["size"], about["weights"]) == (16, 32, network.fingerprint)


def test_torch_export_needs_no_rankgrad_and_takes_any_batch(network, pixels, wanted, tmp_path):
    exported = export_model(network, "torch", tmp_path)
    program = torch.export.load(str(exported.path)).module()
    for batch in (1, 5):
        torch.testing.assert_close(program(pixels[:batch]), wanted[:batch], atol=1e-5, rtol=0)
    assert exported.max_error <= TOLERANCE


def test_onnx_takes_any_batch(network, pixels, wanted, tmp_path):
    import onnxruntime

    exported = export_model(network, "onnx", tmp_path)
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        (found,) = session.run(None, {"pixels": pixels[:batch].numpy()})
        np.testing.assert_allclose(found, wanted[:batch].numpy(), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.onnx"]


def test_scales_are_exported_too(network, pixels, tmp_path):
    scaled = replace(network, recipe=replace(network.recipe, scales=(1.0, 0.5)))
    exported = export_model(scaled, "torch", tmp_path)
    with torch.no_grad():
        wanted = scaled.described(pixels)
        assert (wanted - network.model(pixels)).abs().max() > 1e-3
        torch.testing.assert_close(torch.export.load(str(exported.path)).module()(pixels), wanted, atol=1e-5, rtol=0)


def test_what_differs_is_not_left_behind(network, tmp_path, monkeypatch):
    from rankgrad.search import export

    def slightly_off(path, network):
        model = export._Embedding(network)
        return lambda pixels: model(pixels) + 1e-3

    monkeypatch.setitem(export._READERS, "safetensors", slightly_off)
    with pytest.raises(ValueError, match=r"model.safetensors differ from the network's by 0.001, more than the 0.0001"):
        export_model(network, "safetensors", tmp_path)
    monkeypatch.setitem(export._READERS, "safetensors", lambda path, network: lambda pixels: pixels.mean() * torch.nan)
    with pytest.raises(ValueError, match="differ from the network's by nan"):
        export_model(network, "safetensors", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command(run_folder, tmp_path, capsys):
    assert main_export([str(run_folder), "--out", str(tmp_path)]) == 0
    assert re.search(r"model.safetensors: 1.6 MB, embeddings within \d.\de.\d\d of the network's", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main_export([str(run_folder), "--format", "keras"])
    assert "invalid choice: 'keras'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="format must be one of 'safetensors', 'torch', 'onnx', got 'tf'"):
        export_model(None, "tf", tmp_path)
