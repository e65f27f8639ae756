"""Learned whitening by its properties, over pairs that are written out here."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rankgrad.models import ModelSpec, build_model, initialise_head, learn_whitening

D = 6


@pytest.fixture
def data():
    """Classes of 2 to 9 items around centres, correlated and unequal directions, labels in no order, one item alone."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(40), torch.randint(2, 10, (40,), generator=generator))
    labels = torch.cat((labels * 7 - 50, torch.tensor([10**12])))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    centres = {int(label): torch.randn(D, generator=generator, dtype=torch.float64) for label in labels.unique()}
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64) * torch.logspace(-2, 1, D, dtype=torch.float64)
    noise = torch.randn(len(labels), D, generator=generator, dtype=torch.float64) @ mixing
    return torch.stack([centres[int(label)] for label in labels]) + 0.3 * noise + 5.0, labels


def difference_covariance(descriptors, labels):
    """Mean over items with a match of the mean over its matches of the outer product of the difference."""
    per_item = []
    for i, label in enumerate(labels):
        matches = [j for j in range(len(labels)) if labels[j] == label and j != i]
        if matches:
            difference = descriptors[i] - descriptors[matches]
            per_item.append(difference.T @ difference / len(matches))
    return torch.stack(per_item).mean(dim=0)


def projected(whitening, descriptors):
    return (descriptors - whitening.mean) @ whitening.projection.T


def test_differences_of_matches_become_white(data):
    whitening = learn_whitening(*data)
    covariance = difference_covariance(projected(whitening, data[0]), data[1])
    # the directions differ a million times in variance, which costs six of the sixteen digits
    torch.testing.assert_close(covariance, torch.eye(D, dtype=torch.float64), atol=1e-7, rtol=0)
    assert not torch.allclose(difference_covariance(*data), torch.eye(D, dtype=torch.float64), atol=0.1)


def test_axes_are_uncorrelated_and_ordered_by_variance(data):
    whitening = learn_whitening(*data)
    _, classes, sizes = data[1].unique(return_inverse=True, return_counts=True)
    matched = data[0][sizes[classes] > 1]
    torch.testing.assert_close(whitening.mean, matched.mean(dim=0))
    outputs = projected(whitening, matched)
    covariance = outputs.T @ outputs / len(matched)
    variances = covariance.diagonal()
    torch.testing.assert_close(covariance, variances.diag(), atol=1e-7, rtol=1e-7)
    assert (variances.diff() < 0).all()


def test_does_not_depend_on_order_scale_or_items_without_a_match(data):
    descriptors, labels = data
    whitening = learn_whitening(descriptors, labels)
    # an axis may point either way
    scores = projected(whitening, descriptors)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    shuffled = learn_whitening(descriptors[order], labels[order])
    torch.testing.assert_close(projected(shuffled, descriptors).abs(), scores.abs())
    larger = learn_whitening(100 * descriptors, labels)
    torch.testing.assert_close(projected(larger, 100 * descriptors).abs(), scores.abs())
    more = learn_whitening(torch.cat((descriptors, 1e3 * torch.ones(1, D))), torch.cat((labels, torch.tensor([-3]))))
    torch.testing.assert_close(projected(more, descriptors).abs(), scores.abs())


def test_finds_matches_that_noise_in_one_direction_hides(data):
    descriptors, labels = data
    whitening = learn_whitening(descriptors, labels)

    def found(rows):
        scores = F.normalize(rows) @ F.normalize(rows).T
        return (labels[scores.fill_diagonal_(-2).argmax(dim=1)] == labels).float().mean()

    before, after = found(descriptors - descriptors.mean(dim=0)), found(whitening.apply(descriptors))
    assert after > before + 0.2


def test_apply_gives_unit_rows_of_the_first_axes(data):
    whitening = learn_whitening(*data)
    rows = whitening.apply(data[0].float(), dim=3)
    assert (rows.shape, rows.dtype) == ((len(data[0]), 3), torch.float32)
    torch.testing.assert_close(rows.double(), F.normalize(projected(whitening, data[0])[:, :3]), atol=1e-5, rtol=0)


def test_the_head_starts_as_the_whitening():
    spec = ModelSpec(trunk="convnet", layer_norm=False, l2_pooled=True, dim=10)
    model = build_model(spec, seed=0).eval()
    images = torch.randint(256, (8, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        pooled = model.pooled(images)
    torch.testing.assert_close(pooled.norm(dim=1), torch.ones(8))
    generator = torch.Generator().manual_seed(1)
    mean, projection = torch.rand(256, generator=generator), torch.randn(256, 256, generator=generator)
    initialise_head(model, mean, projection)
    with torch.no_grad():
        torch.testing.assert_close(model.head.linear(pooled), (pooled - mean) @ projection[:10].T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(images), F.normalize((pooled - mean) @ projection[:10].T), rtol=1e-4, atol=1e-4)
    assert model.head.linear.weight.requires_grad
    assert model.head.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("seed", range(4))
def test_the_rounding_of_layer_norm_is_no_direction(seed):
    """Its outputs sum to 0 but for rounding, which would be blown up a million times."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(400) % 50
    features = 20 + torch.randn(50, 16, generator=draws)[labels] + 0.3 * torch.randn(400, 16, generator=draws)
    descriptors = F.layer_norm(features, (16,))
    with pytest.warns(UserWarning, match=r"differ in 15 of 16 directions only"):
        whitening = learn_whitening(descriptors, labels)
    assert whitening.projection.norm(dim=1).max() < 1e3


def test_too_few_descriptors_are_regularised_with_a_message(data):
    descriptors, labels = data
    flat = descriptors.clone()
    flat[:, 2] = 1.0
    with pytest.warns(UserWarning, match=r"differ in 5 of 6 directions only, so 0.1% of the mean variance is added"):
        whitening = learn_whitening(flat, labels)
    assert torch.isfinite(whitening.projection).all()
    covariance = difference_covariance(projected(whitening, flat), labels)
    # nothing is blown up: no direction varies more than 1, and those that hardly varied less
    assert torch.linalg.eigvalsh(covariance).max() < 1 + 1e-6


@pytest.mark.parametrize(
    ("descriptors", "labels", "error", "message"),
    [
        (torch.rand(4, D), torch.arange(4), ValueError, "no two of the 4 descriptors share a label"),
        (torch.ones(4, D), torch.zeros(4, dtype=torch.long), ValueError, "descriptors of one label are all equal"),
        (
            torch.rand(4, D),
            torch.zeros(3, dtype=torch.long),
            ValueError,
            r"labels must be one per row of descriptors, shape \(4,\)",
        ),
        (torch.rand(4), torch.zeros(4, dtype=torch.long), ValueError, "learn_whitening: descriptors must be"),
        (torch.rand(4, D) / 0, torch.zeros(4, dtype=torch.long), ValueError, "descriptors must be finite, got 24 NaN"),
        (torch.rand(4, D), torch.zeros(4), TypeError, "labels must be integers"),
    ],
)
def test_says_what_is_wrong_with_the_descriptors(descriptors, labels, error, message):
    with pytest.raises(error, match=message):
        learn_whitening(descriptors, labels)


def test_says_what_is_wrong_with_the_layer():
    spec = ModelSpec(trunk="convnet", layer_norm=False, dim=10)
    with pytest.raises(ValueError, match="no linear layer to set; build it with a dim above 0"):
        initialise_head(build_model(replace(spec, dim=0)), torch.zeros(256), torch.eye(256))
    model = build_model(spec)
    with pytest.raises(ValueError, match=r"projection must be \[at least 10, 256\] for the linear layer, got shape \(9, 256\)"):
        initialise_head(model, torch.zeros(256), torch.zeros(9, 256))
    with pytest.raises(ValueError, match=r"mean must be \[256\], got shape \(255,\)"):
        initialise_head(model, torch.zeros(255), torch.eye(256))
