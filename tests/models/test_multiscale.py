"""Embeddings over several scales against the same written out by hand."""

import pytest
import torch
from torch.nn import functional as F

from rankgrad.models import ModelSpec, build_model, embed_multiscale

IMAGES = torch.randint(256, (2, 3, 40, 56), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def model():
    return build_model(ModelSpec(trunk="convnet", dim=16), seed=0).eval()


def at(height, width):
    return F.interpolate(IMAGES.float(), size=(height, width), mode="bilinear", align_corners=False)


@torch.no_grad()
def test_is_the_average_over_three_sizes(model):
    # 40 and 56 times the root of 2 and of one half
    sizes = ((40, 56), (57, 79), (28, 40))
    expected = F.normalize(sum(model(at(*size)) for size in sizes))
    embeddings = embed_multiscale(model, IMAGES)
    torch.testing.assert_close(embeddings, expected)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))
    assert not torch.allclose(embeddings, model(IMAGES), atol=1e-3)


@torch.no_grad()
def test_one_scale_is_the_model_itself(model):
    torch.testing.assert_close(embed_multiscale(model, IMAGES, scales=(1.0,)), model(IMAGES))
    torch.testing.assert_close(embed_multiscale(model, IMAGES, scales=[2]), model(at(80, 112)))


@torch.no_grad()
def test_a_power_mean_where_there_is_no_linear_layer():
    model = build_model(ModelSpec(trunk="convnet", dim=0, layer_norm=False), seed=0).eval()
    expected = F.normalize(((model(at(40, 56)) ** 3 + model(at(80, 112)) ** 3) / 2) ** (1 / 3))
    torch.testing.assert_close(embed_multiscale(model, IMAGES, scales=(1, 2), power=3.0), expected)


def test_a_batch_is_its_images_one_at_a_time(model):
    one_by_one = torch.cat([embed_multiscale(model, image[None]) for image in IMAGES])
    torch.testing.assert_close(embed_multiscale(model, IMAGES), one_by_one)
    assert not one_by_one.requires_grad


def test_a_vit_is_embedded_at_sizes_that_its_patches_do_not_divide():
    model = build_model(ModelSpec(trunk="vit_tiny_patch16_224", dim=8), seed=0).eval()
    assert embed_multiscale(model, IMAGES).shape == (2, 8)


def test_a_tiny_image_keeps_a_pixel():
    assert embed_multiscale(
        build_model(ModelSpec(trunk="convnet"), seed=0).eval(), IMAGES[..., :2, :2], scales=(0.1, 1.0)
    ).shape == (
        2,
        512,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": ()}, "embed_multiscale: scales must hold at least one number"),
        ({"scales": (1.0, 0.0)}, "scales must be a finite number above 0"),
        ({"power": -1.0}, "power must be a finite number above 0"),
        ({"power": 3.0}, "power 3 needs embeddings without negative values"),
        ({"images": IMAGES[0]}, r"images must be \[batch, channels, height, width\], got shape \(3, 40, 56\)"),
    ],
)
def test_says_what_is_wrong(model, options, message):
    with pytest.raises(ValueError, match=message):
        embed_multiscale(model, **{"images": IMAGES, **options})


def test_a_model_in_training_is_refused(model):
    with pytest.raises(ValueError, match=r"in training mode; call model.eval\(\) first"):
        embed_multiscale(model.train(), IMAGES)
