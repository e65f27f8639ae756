"""A feature at every position of an image to one feature for the image."""

import torch
from torch import Tensor, nn


class GeM(nn.Module):
    """Generalised mean (mean of x^p)^(1/p) over the last dimension, x at least `eps`: p = 1 is the mean, infinity the maximum.

    Powers are taken of x over its largest value, which changes neither the result nor its gradient, so that no exponent
    over- or underflows: eps^7 is 0 in float32, and a channel without any activation would have an infinite gradient.
    """

    p: Tensor

    def __init__(self, p: float = 3.0, *, learned: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        start = torch.tensor([float(p)])
        if learned:
            self.p = nn.Parameter(start)
        else:
            # part of the state under the same name, so that the weights fit whether p is learned or not
            self.register_buffer("p", start)

    def forward(self, features: Tensor) -> Tensor:
        p = self.p.to(features.dtype)
        positive = features.clamp(min=self.eps)
        largest = positive.detach().amax(dim=-1, keepdim=True)
        mean = (positive / largest).pow(p).mean(dim=-1)
        return mean.pow(1 / p) * largest.squeeze(-1)

    def extra_repr(self) -> str:
        return f"p={self.p.item():.3g}, learned={isinstance(self.p, nn.Parameter)}, eps={self.eps:g}"


class Mean(nn.Module):
    """The average over the last dimension."""

    def forward(self, features: Tensor) -> Tensor:
        return features.mean(dim=-1)


class Maximum(nn.Module):
    """The largest over the last dimension."""

    def forward(self, features: Tensor) -> Tensor:
        return features.amax(dim=-1)


class First(nn.Module):
    """The first along the last dimension: the class token."""

    def forward(self, features: Tensor) -> Tensor:
        return features[..., 0]
