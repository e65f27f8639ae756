"""Each trainable parameter in exactly one group, with the rate and the decay it should have."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rankgrad.models import ModelSpec, build_model, parameter_groups

SPEC = ModelSpec(trunk="convnet", dim=16)


def table(model, **options):
    """Name of parameter -> (lr, weight decay)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, **{"lr": 1e-3, "weight_decay": 0.1, **options})
    members = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len(members) == len(dict(members)), "a parameter is in two groups"
    return dict(members)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, dim=0, layer_norm=False, gem_learned=False),
        ModelSpec(trunk="resnet18", batch_norm="fixed"),
        ModelSpec(trunk="resnet18", batch_norm="frozen"),
        ModelSpec(trunk="vit_tiny_patch16_224"),
    ],
)
@pytest.mark.parametrize("decay_norms", [True, False])
def test_every_trainable_parameter_once_and_no_frozen_one(spec, decay_norms):
    model = build_model(spec, seed=0)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert table(model, decay_norms=decay_norms).keys() == trainable
    if spec.batch_norm == "fixed":
        assert "trunk.bn1.weight" not in trainable


def test_by_default_all_is_alike_but_the_exponent_does_not_decay():
    rates = table(build_model(SPEC, seed=0))
    assert rates.pop("head.pool.p") == (1e-3, 0.0)
    assert set(rates.values()) == {(1e-3, 0.1)}


def test_multipliers_reach_their_own_parameters_only():
    rates = table(build_model(SPEC, seed=0), head_lr=10, gem_lr=5, decay_gem=True)
    fast = {name: rate for name, (rate, _) in rates.items() if rate != 1e-3}
    assert fast == pytest.approx({"head.linear.weight": 1e-2, "head.linear.bias": 1e-2, "head.pool.p": 5e-3})
    assert {decay for _, decay in rates.values()} == {0.1}


def test_norms_and_biases_can_be_exempt_from_decay():
    for spec in (SPEC, ModelSpec(trunk="resnet18", dim=8)):
        model = build_model(spec, seed=0)
        norms = {
            f"{name}.{part}"
            for name, layer in model.named_modules()
            if isinstance(layer, (nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm))
            for part in ("weight", "bias")
        }
        free = {name for name, (_, decay) in table(model, decay_norms=False).items() if decay == 0.0}
        assert free == norms | {"head.linear.bias", "head.pool.p"}


def test_what_timm_exempts_is_exempt_too():
    rates = table(build_model(ModelSpec(trunk="vit_tiny_patch16_224"), seed=0), decay_norms=False, head_lr=2)
    assert rates["trunk.cls_token"] == rates["trunk.pos_embed"] == (1e-3, 0.0)
    assert rates["trunk.patch_embed.proj.weight"] == (1e-3, 0.1)
    assert (rates["head.linear.weight"], rates["head.linear.bias"]) == ((2e-3, 0.1), (2e-3, 0.0))


def test_an_optimizer_takes_them_and_the_names_stay_readable():
    groups = parameter_groups(build_model(SPEC, seed=0), lr=1e-3, weight_decay=0.1, decay_norms=False)
    optimizer = torch.optim.AdamW(groups)
    names = [group["name"] for group in optimizer.state_dict()["param_groups"]]
    assert names == ["trunk", "trunk-no-decay", "gem", "head-no-decay", "embedding", "embedding-no-decay"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": 0}, ValueError, "parameter_groups: lr must be a finite number above 0, got 0"),
        ({"weight_decay": -1e-4}, ValueError, "weight_decay must be a finite number of at least 0"),
        ({"head_lr": float("nan")}, ValueError, "head_lr must be finite"),
        ({"gem_lr": "10"}, TypeError, "gem_lr must be a number"),
    ],
)
def test_says_what_is_wrong(options, error, message):
    with pytest.raises(error, match=message):
        table(build_model(SPEC, seed=0), **options)


def test_a_wrapped_model_is_refused():
    with pytest.raises(TypeError, match="must be an Embedder, got Sequential; make the groups before wrapping it"):
        parameter_groups(nn.Sequential(build_model(SPEC)), lr=1.0, weight_decay=0.0)
