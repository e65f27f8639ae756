"""Every kind of trunk gives features of the shape it announces, and a wrong name is answered with a better one."""

import importlib.util
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn

from rankgrad.models import ModelSpec, build_model, trunks
from rankgrad.models.trunks import TRUNKS, build_trunk, trunk_names


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
        ("resnet5", r"unknown trunk 'resnet5'; did you mean .*resnet50"),
        ("vit-b-32", r"did you mean .*vit-b32"),
        ("timm/vit_base_patch16_22", r"did you mean .*vit_base_patch16_224"),
        ("qqqqqqqqqqqqqqqqqqqqqqqqqqqq", r"choose one of convnet, resnet18, .* or a name of timm.list_models\(\)"),
        ("vit_tiny_patch16_224.nothing", r"timm has no weights 'vit_tiny_patch16_224.nothing'; did you mean .*augreg_in21k"),
        ("deit_tiny_distilled_patch16_224", "cannot be built without its own pooling"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name, message):
    with pytest.raises(ValueError, match=message):
        build_trunk(name)


@pytest.mark.parametrize("name", ["convnet", "vit_wee_patch16_reg1_gap_256.nothing", "test_vit4"])
def test_weights_that_nobody_published(name):
    with pytest.raises(ValueError, match=r"has no published weights|timm has no"):
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
        OSError,
        match=r"could not be downloaded \(Name or service not known\).*download them from https://.*--weights FILE",
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


def test_resnet50_v1_strides_in_the_first_convolution():
    """Against the same network written out: only the place of the stride differs from torchvision's."""
    from torchvision import models

    net = models.resnet50(weights=None).eval()
    trunk = build_trunk("resnet50-v1")
    names = {key for key in net.state_dict() if not key.startswith("fc.")}
    assert set(trunk.body.state_dict()) == names
    trunk.body.load_state_dict({key: value for key, value in net.state_dict().items() if key in names})
    trunk.body.eval()
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        x = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(images)))))
        for stage in (net.layer2, net.layer3, net.layer4):
            block = stage[0]
            y = torch.relu(block.bn1(nn.functional.conv2d(x, block.conv1.weight, stride=2)))
            y = torch.relu(block.bn2(nn.functional.conv2d(y, block.conv2.weight, padding=1)))
            x = stage[1:](torch.relu(block.bn3(block.conv3(y)) + block.downsample(x)))
        torch.testing.assert_close(trunk.body(images), x)
        standard = build_trunk("resnet50").body
        standard.load_state_dict(trunk.body.state_dict())
        assert not torch.allclose(standard.eval()(images), x, atol=1e-3)
    with pytest.raises(ValueError, match="'resnet50-v1' has no published weights to download; pass a file"):
        build_trunk("resnet50-v1", pretrained=True)


def test_the_registry_is_the_list_of_names():
    assert trunk_names() == tuple(TRUNKS)
    assert {"convnet", "resnet50", "resnet50-v1", "vit-s32"} <= set(trunk_names())


MODULE = """
import torch
from torch import nn
from rankgrad.models.trunks import Trunk

def maps():
    return nn.Conv2d(3, 6, 3, stride=8)

def vectors(pretrained):
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
    nn.init.constant_(net[2].bias, 1.0 if pretrained else 0.0)
    net.mean, net.std, net.input_size = (0.5,) * 3, (0.25,) * 3, 48
    return net

class Tokens(nn.Module):
    num_prefix_tokens = 1
    def __init__(self):
        super().__init__()
        self.embed, self.cls_token = nn.Conv2d(3, 7, 16, stride=16), nn.Parameter(torch.zeros(1, 1, 7))
    def forward(self, x):
        return torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x).flatten(2).transpose(1, 2)], 1)

def described():
    return Trunk("mine", nn.Conv2d(3, 4, 1), channels=4, input_size=16)

def pair():
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()

def text():
    return "a network"

def needy(depth):
    return None

number = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trunks, "_trusted", {"*"})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_networks"
    sys.modules.pop("own_networks", None)


@pytest.mark.parametrize(
    ("factory", "channels", "pool"), [("maps", 6, "gem"), ("vectors", 5, "avg"), ("Tokens", 7, "cls"), ("described", 4, "gem")]
)
def test_a_network_of_ones_own(own_module, factory, channels, pool):
    model = build_model(ModelSpec(trunk=f"{own_module}:{factory}", dim=8), seed=0)
    assert (model.channels, model.spec.pool) == (channels, pool)
    embeddings = model(torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8))
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))
    embeddings.sum().backward()


def test_a_factory_says_how_its_pixels_are_normalised_and_whether_it_is_pretrained(own_module):
    trunk = build_trunk(f"{own_module}:vectors", pretrained=True)
    assert (trunk.mean, trunk.std, trunk.input_size) == ((0.5,) * 3, (0.25,) * 3, 48)
    assert trunk.body[2].bias.tolist() == [1.0] * 5
    assert build_trunk(f"{own_module}:vectors").body[2].bias.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("own_network:maps", ValueError, "'own_network:maps' cannot be imported .*run the command from the folder"),
        ("own_networks:map", ValueError, "own_networks has no 'map'; did you mean 'maps'"),
        ("own_networks:number", ValueError, "must be a function or class, got int"),
        ("own_networks:needy", ValueError, "must be callable without arguments.*missing a required argument: 'depth'"),
        ("own_networks:text", ValueError, "must return an nn.Module or a Trunk, got 'a network'"),
        ("own_networks:pair", ValueError, "a trunk must return a tensor, got tuple"),
    ],
)
def test_a_factory_that_does_not_work_is_answered_with_a_sentence(own_module, name, error, message):
    with pytest.raises(error, match=message):
        build_trunk(name)


def test_a_factory_runs_only_when_it_is_trusted(own_module, monkeypatch):
    monkeypatch.setattr(trunks, "_trusted", set())
    with pytest.raises(ValueError, match=r"runs Python code\. If you trust it, add --trust-code"):
        build_trunk("own_networks:maps")
    assert "own_networks" not in sys.modules
    trunks.trust_factory("own_networks:maps")
    assert build_trunk("own_networks:maps").channels == 6
    with pytest.raises(ValueError, match="runs Python code"):
        build_trunk("own_networks:Tokens")


def test_a_timm_model_in_a_folder(tmp_path, monkeypatch):
    import timm
    from timm.models import save_for_hf

    net = timm.create_model("resnet10t", num_classes=3)
    save_for_hf(net, tmp_path / "mynet", model_args={"num_classes": 3}, safe_serialization=True)
    monkeypatch.chdir(tmp_path)
    trunk = build_trunk("./mynet", pretrained=True)
    assert (trunk.channels, trunk.name) == (512, "./mynet")
    assert torch.equal(trunk.body.state_dict()["conv1.0.weight"], net.state_dict()["conv1.0.weight"])
    with pytest.raises(FileNotFoundError, match=r"'\./none' is not the folder of a timm model: it has no config.json"):
        build_trunk("./none")
    (tmp_path / "mynet" / "config.json").write_text('{"architecture": "nothing"}')
    with pytest.raises(ValueError, match="the timm model in mynet cannot be loaded"):
        build_trunk("./mynet")


def test_without_a_network_the_download_fails_at_once(monkeypatch, tmp_path):
    def unreachable(*arguments, **options):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"could not be downloaded .*huggingface.co/timm/vit_tiny.*--weights FILE"):
        build_trunk("vit_tiny_patch16_224", pretrained=True)
    assert time.monotonic() - began < 20
