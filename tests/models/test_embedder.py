"""Pixels to unit embeddings: shapes, modes of batch norm, precision, seeds."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankgrad.models import Embedder, ModelSpec, build_model
from rankgrad.train.gradient_check import live_batch_norms

TINY_VIT = "vit_tiny_patch16_224"
SMALL = ModelSpec(trunk="convnet", dim=16)
BATCH_NORMED = ModelSpec(trunk="resnet18", dim=16)


def pictures(count=4, side=32, channels=3):
    return torch.randint(256, (count, channels, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("spec", "side", "dim"),
    [
        (SMALL, 32, 16),
        (replace(SMALL, dim=0), 48, 256),
        (replace(SMALL, pool="avg", layer_norm=False), 64, 16),
        (replace(SMALL, pool="max", gem_learned=False), 32, 16),
        (replace(SMALL, l2_pooled=True, layer_norm=False), 32, 16),
        (BATCH_NORMED, 64, 16),
        # weights that small need a batch norm at work
        (ModelSpec(trunk="googlenet", dim=8, batch_norm="live"), 64, 8),
        (ModelSpec(trunk=TINY_VIT, dim=8), 32, 8),
        (ModelSpec(trunk=TINY_VIT, pool="gem", dim=8), 48, 8),
    ],
)
def test_embeddings_are_unit_rows_and_every_parameter_gets_a_gradient(spec, side, dim):
    model = build_model(spec, seed=0)
    embeddings = model(pictures(side=side))
    assert (embeddings.shape, embeddings.dtype, model.dim) == ((4, dim), torch.float32, dim)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
    # a direction: along the embedding itself the length does not change
    (embeddings * torch.randn(4, dim)).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []


def test_the_head_is_pool_norm_linear_length():
    model = build_model(SMALL, seed=0).eval()
    pixels = (pictures() / 255 - 0.5) / 0.5
    features = model.trunk(pixels).clamp(min=1e-6)
    pooled = model.head.norm(features.pow(3).mean(dim=(2, 3)).pow(1 / 3))
    torch.testing.assert_close(model.pooled(pictures()), pooled)
    torch.testing.assert_close(model(pictures()), F.normalize(model.head.linear(pooled)))


def test_the_class_token_and_the_patches_are_told_apart():
    tokens = torch.randn(2, 5, 192)
    for pool, expected in {"cls": tokens[:, 0], "avg": tokens[:, 1:].mean(dim=1), "max": tokens[:, 1:].amax(dim=1)}.items():
        model = build_model(ModelSpec(trunk=TINY_VIT, pool=pool, layer_norm=False, dim=0), seed=0)
        model.trunk = nn.Identity()
        model.normalised = lambda images: images
        torch.testing.assert_close(model.pooled(tokens), expected)


def test_maps_with_channels_last_give_the_same_positions():
    model = build_model(replace(SMALL, layer_norm=False, dim=0, pool="avg"), seed=0)
    model.trunk, model.normalised = nn.Identity(), lambda images: images
    maps = torch.randn(2, 256, 3, 4)
    expected = model.features(maps)
    model._channels_last = True
    assert torch.equal(model.features(maps.permute(0, 2, 3, 1)), expected)


@pytest.mark.parametrize(
    ("trunk", "pool"), [("convnet", "gem"), (TINY_VIT, "cls"), ("vit_base_patch16_siglip_224", "avg"), ("resnet50", "gem")]
)
def test_auto_pooling_follows_the_trunk(trunk, pool):
    with torch.device("meta"):
        model = build_model(ModelSpec(trunk=trunk))
    assert model.spec == ModelSpec(trunk=trunk, pool=pool)


def test_bytes_floats_and_grey_are_the_same_picture():
    model = build_model(SMALL, seed=0)
    torch.testing.assert_close(model(pictures()), model(pictures().float()), rtol=0, atol=0)
    grey = pictures(channels=1)
    torch.testing.assert_close(model(grey), model(grey.repeat(1, 3, 1, 1)), rtol=0, atol=0)


def test_pixels_can_be_normalised_as_for_imagenet():
    images = pictures()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(build_model(replace(SMALL, pixels="imagenet")).normalised(images), expected)
    torch.testing.assert_close(build_model(SMALL).normalised(images), images / 127.5 - 1)


def train_one_step(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    embeddings = model(pictures(side=64))
    (embeddings * torch.randn(embeddings.shape)).sum().backward()
    optimizer.step()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("mode", "statistics", "affine"), [("frozen", False, True), ("fixed", False, False), ("live", True, True)]
)
def test_batch_norm_changes_only_what_its_mode_allows(mode, statistics, affine):
    model = build_model(replace(BATCH_NORMED, batch_norm=mode), seed=0)
    # training goes on after an evaluation, as in every loop
    model.eval()
    model.train()
    changed = train_one_step(model)
    assert ("trunk.bn1.running_mean" in changed) == statistics
    assert any("running_" in name or "num_batches" in name for name in changed) == statistics
    assert ("trunk.bn1.weight" in changed) == ("trunk.layer3.0.bn1.bias" in changed) == affine
    assert "trunk.conv1.weight" in changed
    assert model.training
    assert bool(live_batch_norms(model)) == statistics


def test_frozen_statistics_make_an_embedding_independent_of_its_batch():
    images = pictures(side=64)
    for mode, same in (("frozen", True), ("live", False)):
        model = build_model(replace(BATCH_NORMED, batch_norm=mode), seed=0).train()
        with torch.no_grad():
            assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-5) == same


def test_the_mode_holds_for_batch_norms_converted_afterwards_and_inside_wrappers():
    model = build_model(BATCH_NORMED, seed=0)
    wrapped = nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    wrapped.eval()
    wrapped.train()
    assert any(isinstance(layer, nn.SyncBatchNorm) for layer in wrapped.modules())
    assert live_batch_norms(wrapped) == []


def test_live_batch_norms_are_named():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False).eval())
    assert live_batch_norms(model) == ["0", "2"]


@pytest.mark.parametrize("spec", [SMALL, replace(SMALL, dim=0, layer_norm=False), ModelSpec(trunk=TINY_VIT, dim=8)])
def test_the_head_stays_in_float32_under_autocast(spec):
    model, seen = build_model(spec, seed=0), {}
    model.head.register_forward_pre_hook(lambda module, inputs: seen.update(features=inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, pooled = model(pictures()), model.pooled(pictures())
    assert embeddings.dtype == pooled.dtype == torch.float32
    # in bfloat16 a length is right to 0.4% only
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(embeddings, model.head(seen["features"].float()), rtol=0, atol=0)
    embeddings.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(("dtype", "out"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_a_converted_model_works(dtype, out):
    model = build_model(SMALL, seed=0).to(dtype)
    embeddings = model(pictures())
    assert embeddings.dtype == out
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4, dtype=out))


def test_compiles_into_one_graph():
    model = build_model(SMALL, seed=0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pictures()), model(pictures()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(pictures()).dtype == torch.float32


def test_channels_last_gives_the_same_embeddings_and_stays_channels_last():
    model = build_model(BATCH_NORMED, seed=0)
    images = pictures(side=64)
    expected = model(images)
    model = model.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    assert model.normalised(images).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_a_seed_decides_the_weights_and_leaves_torchs_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first, again, other = (build_model(SMALL, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["head.linear.weight"], other["head.linear.weight"])
    assert not torch.equal(first["trunk.0.weight"], other["trunk.0.weight"])
    torch.manual_seed(0)
    assert torch.equal(build_model(SMALL).state_dict()["trunk.0.weight"], first["trunk.0.weight"])


def test_the_state_survives_a_round_trip_and_is_plain():
    model = build_model(replace(SMALL, pixels="imagenet"), seed=0).eval()
    other = build_model(SMALL, seed=1).eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(pictures()), model(pictures()), rtol=0, atol=0)
    names = {name for name in model.state_dict() if not name.startswith("trunk.")}
    assert names == {
        "pixel_mean",
        "pixel_std",
        "head.pool.p",
        "head.norm.weight",
        "head.norm.bias",
        "head.linear.weight",
        "head.linear.bias",
    }


def test_a_spec_survives_json():
    spec = ModelSpec(trunk="vit-b16", weights="default", dim=128)
    assert ModelSpec(**json.loads(json.dumps(asdict(spec)))) == spec


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pool": "mean"}, ValueError, "ModelSpec: pool must be one of 'auto', 'gem', 'avg', 'max', 'cls', got 'mean'"),
        ({"batch_norm": "off"}, ValueError, "batch_norm must be one of 'frozen', 'fixed', 'live', got 'off'"),
        ({"pixels": "raw"}, ValueError, "pixels must be one of"),
        ({"gem_p": 0.0}, ValueError, "gem_p must be a finite number above 0"),
        ({"dim": -1}, ValueError, "dim must be at least 0, got -1"),
        ({"dim": 1.5}, TypeError, "dim must be an integer"),
        ({"trunk": ""}, TypeError, "trunk must be a non-empty string"),
        ({"weights": None}, TypeError, "weights must be a non-empty string"),
        ({"l2_pooled": True}, ValueError, "layer_norm undoes the normalisation"),
    ],
)
def test_a_spec_checks_itself(changes, error, message):
    with pytest.raises(error, match=message):
        ModelSpec(**changes)


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"pool 'cls' needs a class token, convnet has none"):
        build_model(replace(SMALL, pool="cls"))
    with pytest.raises(ValueError, match="build_model: seed must be at least 0, got -1"):
        build_model(SMALL, seed=-1)
    model = build_model(SMALL)
    with pytest.raises(ValueError, match=r"images must be \[batch, 3 or 1, height, width\], got shape \(3, 32, 32\)"):
        model(pictures()[0])
    with pytest.raises(ValueError, match=r"got shape \(1, 32, 32, 3\)"):
        model(torch.zeros(1, 32, 32, 3))
    with pytest.raises(TypeError, match=r"must be uint8 or floating-point with values 0..255, got torch.int64"):
        model(pictures().long())
    with pytest.raises(TypeError, match=r"images must be a torch.Tensor, got ndarray"):
        model(pictures().numpy())


def test_the_room_opens_without_torchvision_and_timm():
    code = "import sys, rankgrad.models; print(*{'torchvision', 'timm', 'safetensors', 'PIL'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""


def test_the_small_trunk_needs_no_other_package(monkeypatch):
    for name in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert isinstance(build_model(SMALL), Embedder)
