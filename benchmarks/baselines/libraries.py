"""The losses of pytorch-metric-learning."""

from torch import Tensor

from benchmarks.presets import BINS, TAU_RANK


def library_fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """FastAP of pytorch-metric-learning."""
    from pytorch_metric_learning.losses import FastAPLoss

    loss: Tensor = FastAPLoss(num_bins=BINS)(embeddings, labels)
    return loss


def library_smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Smooth-AP of pytorch-metric-learning, N x N x N."""
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss: Tensor = SmoothAPLoss(temperature=TAU_RANK)(embeddings, labels)
    return loss
