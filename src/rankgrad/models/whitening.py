"""Learned whitening (Mikolajczyk & Matas, 2007): the linear layer to start from when descriptors are good already.

It scales down the directions in which matching descriptors differ, then turns the axes so that the first carry most of what is
left: distances then count what tells classes apart, and cutting off the last axes costs least.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rankgrad._checks import check_count, check_embeddings, check_finite, check_labels, check_tensor, shape_of
from rankgrad.models.embedder import Embedder

# An eigenvalue below this part of the largest is rounding error: of sums in float64, or, below a tenth of their type's
# precision, of the descriptors. After layer norm in float32, whose outputs sum to 0 but for rounding, the ratio was 1e-12.
SINGULAR, SINGULAR_OF_EPS = 1e-12, 0.1
# of the mean variance, added in every direction where some have none
RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class Whitening:
    """x -> projection (x - mean).

    Attributes:
        mean: [D], float64.
        projection: [D, D], float64, rows by descending variance of what they give.
        spanned: directions in which matching descriptors differ, D if nothing was added.
    """

    mean: Tensor
    projection: Tensor
    spanned: int

    def apply(self, descriptors: Tensor, dim: int | None = None) -> Tensor:
        """Unit rows [N, dim] of descriptors [N, D], in their own type; `dim` None keeps D."""
        check_embeddings(descriptors, name="descriptors", caller="Whitening.apply")
        if dim is not None:
            check_count(dim, name="dim", caller="Whitening.apply")
        mean, projection = self.mean.to(descriptors.device), self.projection[:dim].to(descriptors.device)
        return F.normalize((descriptors.double() - mean) @ projection.T).to(descriptors.dtype)


def learn_whitening(descriptors: Tensor, labels: Tensor) -> Whitening:
    """Whitening under which the difference of two descriptors of one class has covariance 1, axes by descending variance.

    Differences are averaged over the matches of an item, then over all items that have one, so that a class weighs as much as
    it has items. No pair is formed: in a class of n, the outer products of all differences sum to 2 n times its scatter
    around its mean. Items without a match do not count.

    Where the differences do not span the space, 0.1% of their mean variance is added in every direction, with a warning.

    Args:
        descriptors: [N, D], as they enter the linear layer, `Embedder.pooled`.
        labels: [N] integers.
    """
    caller = "learn_whitening"
    check_embeddings(descriptors, name="descriptors", caller=caller)
    check_labels(labels, items=len(descriptors), of="descriptors", name="labels", caller=caller)
    check_finite(descriptors, name="descriptors", caller=caller)
    X = descriptors.detach().double()
    _, classes, sizes = labels.to(X.device).unique(return_inverse=True, return_counts=True)
    matched = sizes[classes] > 1
    if not bool(matched.any()):
        raise ValueError(f"{caller}: no two of the {len(X)} descriptors share a label; whitening is learned from matching ones")
    X, classes = X[matched], classes[matched]

    n = sizes.double()
    centres = torch.zeros(len(sizes), X.shape[1], dtype=X.dtype, device=X.device).index_add_(0, classes, X) / n[:, None]
    weight = (2 * n / (n - 1).clamp(min=1))[classes]
    within = X - centres[classes]
    differences = (within * weight[:, None]).T @ within / len(X)

    root, spanned = _inverse_root(differences, max(SINGULAR, SINGULAR_OF_EPS * torch.finfo(descriptors.dtype).eps))
    mean = X.mean(dim=0)
    whitened = (X - mean) @ root
    _, axes = torch.linalg.eigh(whitened.T @ whitened / len(X))
    return Whitening(mean, axes.flip(1).T @ root, spanned)


def _inverse_root(covariance: Tensor, singular: float) -> tuple[Tensor, int]:
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[-1]
    if not bool(largest > 0):
        raise ValueError("learn_whitening: descriptors of one label are all equal; whitening is learned from their differences")
    spanned = int((values > singular * largest).sum())
    if spanned < len(values):
        warnings.warn(
            f"learn_whitening: matching descriptors differ in {spanned} of {len(values)} directions only, so {RIDGE:.1%} of "
            "the mean variance is added in every direction; after layer norm, whose outputs sum to 0, one is always missing, "
            "and otherwise more matching descriptors than dimensions avoid that",
            stacklevel=3,
        )
        values = values.clamp(min=0) + RIDGE * values.mean()
    return (vectors / values.sqrt()) @ vectors.T, spanned


@torch.no_grad()
def initialise_head(model: Embedder, mean: Tensor, projection: Tensor) -> None:
    """Set the linear layer of `model` to x -> projection (x - mean), of which it takes the first `model.dim` rows.

    The pooled features that enter the layer must be what the whitening was learned from: `model.pooled(images)`.
    """
    caller = "initialise_head"
    linear = model.head.linear
    if linear is None:
        raise ValueError(f"{caller}: the model has no linear layer to set; build it with a dim above 0")
    check_tensor(mean, name="mean", caller=caller)
    check_tensor(projection, name="projection", caller=caller)
    rows, channels = linear.weight.shape
    if projection.ndim != 2 or projection.shape[0] < rows or projection.shape[1] != channels:
        raise ValueError(
            f"{caller}: projection must be [at least {rows}, {channels}] for the linear layer, got shape {shape_of(projection)}"
        )
    if mean.shape != (channels,):
        raise ValueError(f"{caller}: mean must be [{channels}], got shape {shape_of(mean)}")
    first = projection[:rows].double()
    linear.weight.copy_(first)
    linear.bias.copy_(-(first @ mean.double()))
