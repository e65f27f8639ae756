"""Synthetic embeddings that make the losses work as hard as a batch early in training does."""

import torch
from torch import Tensor


def hard_batch(
    count: int,
    dim: int,
    per_class: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """A batch of overlapping classes: embeddings [count, dim], not normalised, and labels [count] in random order.

    Classes gather around a dozen super-classes and lie closer together than their members, so relevant items stand
    anywhere in the ranking. The variances fall off as a power of the direction's number, as in trained embeddings:
    isotropic noise in many dimensions would put every score near zero, where no rank loss ever works.
    The same numbers come on every device.
    """
    if count < per_class or count % per_class or per_class < 2:
        raise ValueError(f"hard_batch: count must be a multiple of per_class >= 2, got {count} and {per_class}")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.full((count // per_class,), per_class)
    embeddings, labels = _overlapping_classes(sizes, dim, generator)
    return embeddings.to(device, dtype), labels.to(device)


def ragged_batch(
    count: int,
    dim: int,
    most: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The same with 1 to `most` items of a class, each number as likely as any other."""
    if count < 1 or most < 1:
        raise ValueError(f"ragged_batch: count and most must be at least 1, got {count} and {most}")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most + 1, (count,), generator=generator)
    ends = sizes.cumsum(0)
    full = int((ends < count).sum())
    sizes = torch.cat((sizes[:full], torch.tensor([count - int(sizes[:full].sum())])))
    embeddings, labels = _overlapping_classes(sizes, dim, generator)
    return embeddings.to(device, dtype), labels.to(device)


def _overlapping_classes(sizes: Tensor, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Embeddings and labels of classes of these sizes, in random order."""
    classes, super_classes, count = len(sizes), 12, int(sizes.sum())
    deviation = torch.arange(1, dim + 1, dtype=torch.float32) ** -0.6
    deviation /= deviation.norm()

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator) * deviation

    super_class = torch.randint(super_classes, (classes,), generator=generator)
    centres = 0.8 * draw(classes) + 0.8 * draw(super_classes)[super_class]
    # some members are plain and some odd: the spread differs from one to the next
    spread = 0.85 * torch.exp(0.45 * torch.randn(count, 1, generator=generator))
    members = centres.repeat_interleave(sizes, 0) + spread * draw(count)
    # a rotation, so that no single coordinate carries the large variances
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    order = torch.randperm(count, generator=generator)
    labels = torch.arange(classes).repeat_interleave(sizes)[order]
    return (members @ rotation)[order], labels
