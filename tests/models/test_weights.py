"""Files of weights: good ones under any names, bad ones with a sentence."""

import json
import os
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rankgrad.models import ModelSpec, build_model
from rankgrad.models.trunks import build_trunk
from rankgrad.models.weights import CAFFE_SCALES, Weights, load_weights

SPEC = ModelSpec(trunk="convnet", dim=16)


@pytest.fixture
def state():
    return build_model(SPEC, seed=5).trunk.state_dict()


def stored(folder, state, name="weights.pth"):
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return replace(SPEC, weights=str(path))


def has(model, state):
    mine = model.trunk.state_dict()
    return mine.keys() == state.keys() and all(torch.equal(value, state[name]) for name, value in mine.items())


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "weights.pt"])
def test_each_kind_of_file(tmp_path, state, name):
    spec = stored(tmp_path, state, name)
    assert has(build_model(spec, seed=0), state)
    assert not has(build_model(SPEC, seed=0), state)


@pytest.mark.parametrize("prefix", ["module.", "model.", "backbone.", "trunk.", "module.backbone.", "_orig_mod.encoder_q."])
def test_any_prefix(tmp_path, state, prefix):
    renamed = {prefix + name: value for name, value in state.items()}
    assert has(build_model(stored(tmp_path, {**renamed, "projector.weight": torch.zeros(2)}), seed=0), state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_beside_other_things(tmp_path, state, key):
    assert has(build_model(stored(tmp_path, {"epoch": 3, key: state, "optimizer": {"lr": 0.1}}), seed=0), state)


@pytest.mark.parametrize("classifier", ["fc", "head", "classifier", "last_linear"])
def test_classifiers_are_left_out(tmp_path, state, classifier):
    with_classifier = {**state, f"{classifier}.weight": torch.zeros(10, 256), f"{classifier}.bias": torch.zeros(10)}
    assert has(build_model(stored(tmp_path, with_classifier), seed=0), state)


def test_a_file_without_counters_of_batches(tmp_path):
    spec = ModelSpec(trunk="resnet18", dim=8)
    state = build_model(spec, seed=5).trunk.state_dict()
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    assert len(old) < len(state)
    torch.save(old, tmp_path / "old.pth")
    assert has(build_model(replace(spec, weights=str(tmp_path / "old.pth")), seed=0), state)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_whole_embedder_comes_with_its_head(tmp_path, prefix):
    trained = build_model(replace(SPEC, gem_p=4.0), seed=5)
    state = {prefix + name: value for name, value in trained.state_dict().items()}
    loaded = build_model(stored(tmp_path, state, "weights.safetensors"), seed=0).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.state_dict().items())


def test_a_whole_embedder_with_another_head_gives_its_trunk_and_says_so(tmp_path):
    trained = build_model(replace(SPEC, dim=32), seed=5)
    spec = stored(tmp_path, trained.state_dict())
    with pytest.warns(
        UserWarning, match=r"only the trunk of .* is loaded, the head starts anew: .*linear.weight \(32, 256\).*\(16, 256\)"
    ):
        model = build_model(spec, seed=0)
    assert has(model, trained.trunk.state_dict())
    assert torch.equal(model.head.linear.weight, build_model(SPEC, seed=0).head.linear.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "3.weight"}, r"does not fit trunk convnet.*: 1 missing \(3.weight\)$"),
        (lambda s: {**s, "12.weight": torch.zeros(1)}, r"1 not in the trunk \(12.weight\)$"),
        (
            lambda s: {**s, "0.weight": torch.zeros(32, 1, 3, 3)},
            r"1 of another shape \(0.weight \(32, 1, 3, 3\) instead of \(32, 3, 3, 3\)\)$",
        ),
        (
            lambda s: {f"layer.{k}x": v for k, v in s.items()},
            r"holds no weights of convnet: its names are like layer.0.weightx, .*",
        ),
        (lambda s: {"epoch": 3}, "holds no tensors by name"),
        (lambda s: [1, 2], "holds no tensors by name"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, state, change, message):
    with pytest.raises(ValueError, match=message):
        build_model(stored(tmp_path, change(state)))


def test_only_the_first_few_names_are_listed(tmp_path, state):
    with pytest.raises(ValueError, match=r"11 missing \(0.weight, 1.weight, 1.bias, ...\)"):
        build_model(stored(tmp_path, {"10.bias": state["10.bias"]}))


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"hello, world" * 9])
def test_a_damaged_file(tmp_path, state, name, damage):
    spec = stored(tmp_path, state, name)
    path = Path(spec.weights)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{name} (cannot be read as plain tensors|is not a complete safetensors file)"):
        build_model(spec)


def test_a_file_with_other_objects_is_not_executed(tmp_path, state):
    with pytest.raises(ValueError, match=r"cannot be read as plain tensors: it holds a types.SimpleNamespace. Ask its"):
        build_model(stored(tmp_path, {"state_dict": state, "options": SimpleNamespace(lr=1)}))


def test_a_refused_pickle_does_not_pass_on_the_advice_to_trust_it(tmp_path):
    spec = stored(tmp_path, {"options": SimpleNamespace(lr=1)})
    with pytest.raises(ValueError, match="cannot be read") as refused:
        build_model(spec)
    said = "".join(traceback.format_exception(refused.value))
    assert not any(word in said for word in ("weights_only", "safe_globals", "two options"))


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"the weights file 'nowhere.pth' does not exist"):
        build_model(replace(SPEC, weights="nowhere.pth"))
    with pytest.raises(
        ValueError,
        match=r"weights must be 'none', 'default', a file that ends in .safetensors.* or a run folder, got 'imagenet'",
    ):
        build_model(replace(SPEC, weights="imagenet"))


def test_real_weights_give_what_timm_computes_with_them():
    root = os.environ.get("RANKGRAD_DATA")
    if root is None:
        pytest.skip("RANKGRAD_DATA is not set")
    path = Path(root) / "weights" / "tf_efficientnet_lite0.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    import timm

    spec = ModelSpec(trunk="tf_efficientnet_lite0", weights=str(path), dim=0, layer_norm=False, pool="avg")
    model = build_model(spec, seed=0).eval()
    theirs = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(path)).eval()
    theirs.reset_classifier(0)
    pixels = torch.randint(256, (2, 3, 96, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(model.pooled(pixels), theirs((pixels / 255 - 0.5) / 0.5), rtol=1e-4, atol=1e-5)


def make_run(folder: Path, steps: dict[str, int], **settings) -> Path:
    """A run folder whose pointers name checkpoints; the seed of a checkpoint's weights is its step."""
    for pointer, step in steps.items():
        place = folder / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        save_file(build_model(replace(SPEC, **settings), seed=step).state_dict(), place / "weights.safetensors")
        (folder / "checkpoints" / f"{pointer}.json").write_text(json.dumps({"folder": place.name, "step": step}))
    (folder / "recipe.json").write_text(json.dumps({"settings": {"trunk": "convnet", **settings}}))
    return folder


@pytest.mark.parametrize(("steps", "used"), [({"last": 7}, 7), ({"last": 7, "best": 3}, 3)])
def test_a_run_folder_gives_its_best_checkpoint(tmp_path, steps, used):
    spec = replace(SPEC, weights=str(make_run(tmp_path / "run", steps)))
    assert has(build_model(spec, seed=0), build_model(SPEC, seed=used).trunk.state_dict())


@pytest.mark.parametrize("pointer", ['{"folder": "../../other"}', '{"folder": 3}', "{", "[]"])
def test_a_folder_that_is_not_a_run_is_refused_and_a_pointer_is_not_followed_outside(tmp_path, pointer):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    save_file(build_model(SPEC, seed=1).state_dict(), tmp_path / "other" / "weights.safetensors")
    (tmp_path / "run" / "checkpoints" / "last.json").write_text(pointer)
    with pytest.raises(ValueError, match="is a folder without weights: wanted is a run with a checkpoint"):
        build_model(replace(SPEC, weights=str(tmp_path / "run")))


@pytest.fixture(scope="module")
def bottlenecks():
    """Trunks of both forms, and weights whose names and shapes fit both, as the conversion of Caffe's has them."""
    trunks = {name: build_trunk(name) for name in ("resnet50", "resnet50-v1")}
    counters = ("num_batches_tracked",)
    state = {key: value for key, value in trunks["resnet50"].body.state_dict().items() if not key.endswith(counters)}
    name, scales = CAFFE_SCALES
    caffe = {**state, name: torch.cat([torch.tensor(scales), state[name][len(scales) :]])}
    return trunks, state, caffe


def load(trunk, state, path="weights.safetensors", saved_from=""):
    load_weights(trunk, torch.nn.Identity(), Weights(state, Path(path), saved_from))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_caffes_resnet50_is_known_and_loads_only_into_its_own_form(bottlenecks, dtype):
    trunks, _, caffe = bottlenecks
    halved = {key: value.to(dtype) for key, value in caffe.items()}
    load(trunks["resnet50-v1"], halved)
    with pytest.raises(ValueError, match=r"weights of a ResNet v1, .*original Caffe model.* Use --trunk resnet50-v1$"):
        load(trunks["resnet50"], halved)


def test_weights_saved_from_one_form_do_not_load_into_the_other(bottlenecks):
    trunks, state, _ = bottlenecks
    for name, other in (("resnet50", "resnet50-v1"), ("resnet50-v1", "resnet50"), ("timm/resnet50", "resnet50-v1")):
        load(trunks[name.removeprefix("timm/")], state, saved_from=name)
        with pytest.raises(ValueError, match=f"saved from trunk {name}"):
            load(trunks[other], state, saved_from=name)
    with pytest.raises(ValueError, match="a download of torchvision"):
        load(trunks["resnet50-v1"], state, "resnet50-0676ba61.pth")


def test_weights_of_an_unknown_form_do_not_load_silently(bottlenecks):
    trunks, state, _ = bottlenecks
    for name, other in (("resnet50", "resnet50-v1"), ("resnet50-v1", "resnet50")):
        with pytest.warns(UserWarning, match=f"does not say which form of ResNet it belongs to.*--trunk {other}$"):
            load(trunks[name], state)
    # what PyTorch saved counts its batches, and PyTorch's networks are v1.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(trunks["resnet50"], trunks["resnet50"].body.state_dict())
