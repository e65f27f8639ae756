"""Every kind of trunk gives features of the shape it announces, and a wrong name is answered with a better one."""

import importlib.util

import pytest
import torch

from rankgrad.models import trunks
from rankgrad.models.trunks import build_trunk, trunk_names


@pytest.mark.parametrize(
    ("name", "side", "channels", "places"),
    [
        ("convnet", 32, 256, 4 * 4),
        ("convnet", 64, 256, 8 * 8),
        ("resnet18", 64, 512, 2 * 2),
        ("googlenet", 64, 1024, 2 * 2),
        ("timm/resnet18", 64, 512, 2 * 2),
        ("tf_efficientnet_lite0", 64, 1280, 2 * 2),
        # its features go through a convolution after the last one that timm counts
        ("mobilenetv3_small_050", 64, 1024, 2 * 2),
    ],
)
def test_maps(name, side, channels, places):
    trunk = build_trunk(name)
    with torch.inference_mode():
        features = trunk.body.eval()(torch.randn(2, 3, side, side))
    assert trunk.channels == channels
    assert (features.shape[:2], features[0, 0].numel()) == ((2, channels), places)
    assert not trunk.tokens


@pytest.mark.parametrize(
    ("name", "input_size", "channels", "prefix", "class_token"),
    [
        ("vit_tiny_patch16_224", 224, 192, 1, True),
        # four registers beside the class token
        ("vit_small_patch14_reg4_dinov2", 518, 384, 5, True),
        # a register and no class token
        ("vit_wee_patch16_reg1_gap_256", 256, 256, 1, False),
        ("vit_base_patch16_siglip_224", 224, 768, 0, False),
        # two stages, of which only the second has the class token, still the first of the tokens given
        ("cait_xxs24_224", 224, 192, 1, True),
        ("vit-b32", 224, 768, 1, True),
        ("vit-b16", 224, 768, 1, True),
        ("vit-s16", 224, 384, 1, True),
        ("vit-s32", 224, 384, 1, True),
    ],
)
def test_tokens(name, input_size, channels, prefix, class_token):
    with torch.device("meta"):
        trunk = build_trunk(name)
    assert trunk.tokens
    assert (trunk.input_size, trunk.channels, trunk.prefix, trunk.class_token) == (input_size, channels, prefix, class_token)


@pytest.mark.parametrize(("name", "channels"), [("resnet34", 512), ("resnet50", 2048), ("resnet101", 2048)])
def test_larger_resnets(name, channels):
    with torch.device("meta"):
        trunk = build_trunk(name)
        assert trunk.body(torch.empty(2, 3, 64, 96)).shape == (2, channels, 2, 3)
    assert trunk.channels == channels


def test_channels_may_come_last():
    with torch.device("meta"):
        trunk = build_trunk("swin_tiny_patch4_window7_224")
        assert trunk.body(torch.empty(1, 3, 224, 224)).shape == (1, 7, 7, 768)
    assert (trunk.channels_last, trunk.channels, trunk.tokens) == (True, 768, False)


def test_a_torchvision_trunk_computes_what_its_network_computes_before_the_pooling():
    from torchvision import models

    images = torch.randn(2, 3, 64, 64)
    for name, options in {"resnet18": {}, "googlenet": {"aux_logits": False, "init_weights": False}}.items():
        net = models.get_model(name, weights=None, **options).eval()
        trunk = build_trunk(name)
        trunk.body.load_state_dict({k: v for k, v in net.state_dict().items() if not k.startswith("fc.")})
        with torch.inference_mode():
            pooled = trunk.body.eval()(images).mean(dim=(2, 3))
            torch.testing.assert_close(net.fc(pooled), net(images))


def test_googlenets_pixels_are_normalised_as_torchvision_does_it_inside():
    from torchvision import models

    pixels = torch.rand(1, 3, 8, 8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (trunks.IMAGENET_MEAN, trunks.IMAGENET_STD))
    net = models.googlenet(weights=None, aux_logits=False, init_weights=False, transform_input=True)
    trunk = build_trunk("googlenet")
    ours = (pixels - torch.tensor(trunk.mean).view(3, 1, 1)) / torch.tensor(trunk.std).view(3, 1, 1)
    torch.testing.assert_close(ours, net._transform_input((pixels - mean) / std))


def test_pixels_of_timm_models_are_normalised_as_timm_says():
    with torch.device("meta"):
        assert build_trunk("tf_efficientnet_lite0").mean == (0.5, 0.5, 0.5)
        assert build_trunk("timm/resnet18").mean == trunks.IMAGENET_MEAN


def test_a_vit_takes_images_of_any_size():
    trunk = build_trunk("vit_tiny_patch16_224")
    with torch.inference_mode():
        assert trunk.body(torch.randn(1, 3, 40, 64)).shape == (1, 1 + 3 * 4, 192)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", r"there is no trunk 'resnet5'; did you mean .*resnet50"),
        ("vit-b-32", r"did you mean .*vit-b32"),
        ("timm/vit_base_patch16_22", r"did you mean .*vit_base_patch16_224"),
        ("qqqqqqqqqqqqqqqqqqqqqqqqqqqq", r"known are convnet, resnet18, .* and timm.list_models\(\)"),
        ("vit_tiny_patch16_224.nothing", r"timm has no weights 'vit_tiny_patch16_224.nothing'; did you mean .*augreg_in21k"),
        ("deit_tiny_distilled_patch16_224", "cannot be built without a pooling of its own"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name, message):
    with pytest.raises(ValueError, match=message):
        build_trunk(name)


@pytest.mark.parametrize("name", ["convnet", "vit_wee_patch16_reg1_gap_256.nothing", "test_vit4"])
def test_weights_that_nobody_published(name):
    with pytest.raises(ValueError, match=r"there are no published weights|timm has no"):
        build_trunk(name, pretrained=True)


@pytest.mark.parametrize(("name", "package"), [("resnet18", "torchvision"), ("vit-b32", "timm")])
def test_says_which_extra_is_missing(name, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == package else wanted)
    with pytest.raises(ModuleNotFoundError, match=rf"{name}.* needs {package}.*pip install 'rankgrad\[train\]'"):
        build_trunk(name)


@pytest.mark.parametrize(
    ("name", "kind"), [("resnet18", OSError), ("resnet18", RuntimeError), ("vit_tiny_patch16_224", OSError)]
)
def test_a_download_that_fails_says_what_to_do(name, kind, monkeypatch):
    def offline(*arguments, **options):
        raise kind("Name or service not known\nand much more")

    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", offline)
    monkeypatch.setattr("timm.create_model", offline)
    with pytest.raises(
        OSError, match=r"weights of .* could not be downloaded \(Name or service not known\).*give a local file"
    ):
        build_trunk(name, pretrained=True)


def test_published_weights_of_torchvision_lose_their_classifiers(monkeypatch):
    from torchvision import models

    published = models.googlenet(weights=None, aux_logits=True, init_weights=False).state_dict()
    assert {"fc.weight", "aux1.fc1.weight"} <= set(published)
    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", lambda self, **options: published)
    loaded = build_trunk("googlenet", pretrained=True).body.state_dict()
    assert all(torch.equal(value, published[key]) for key, value in loaded.items())


def test_the_short_names_exist_in_timm_with_weights():
    import timm

    assert set(trunks.SHORT_NAMES) < set(trunk_names())
    assert set(trunks.SHORT_NAMES.values()) <= set(timm.list_pretrained())
