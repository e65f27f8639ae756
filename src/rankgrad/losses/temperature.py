"""A temperature that changes while a model is trained: learned, on a schedule, or set by hand.

A soft rank depends on scores / tau only. So the ranker keeps its own tau, and scores are multiplied by ranker.tau / tau before
they are ranked: autograd finds the derivative by tau, and neither kernels nor CUDA graphs are made anew when it changes. The
delta and the rho of `UpperBound`, which are lengths and slopes on the same scale, change along with its tau.
"""

import math

import torch
from torch import Tensor, nn

from rankgrad._checks import check_positive
from rankgrad.ops.rankers import Ranker


class Temperature(nn.Module):
    """The tau of `ranker` as it is now; that of the ranker itself until it is learned, scheduled or set.

    Args:
        ranker: one with a tau, unless nothing else is asked for.
        learned: hold the logarithm of tau as a parameter, which stays positive.
        last: tau at the end of training, approached by equal factors from that of the ranker.
        caller: named in errors.
    """

    log_tau: nn.Parameter | None

    def __init__(self, ranker: Ranker, *, learned: bool, last: float | None, caller: str) -> None:
        super().__init__()
        self.last, self.caller = last, caller
        self.fixed: float | None = None
        if learned and last is not None:
            raise ValueError(f"{caller}: learn_tau and tau_end exclude each other, got both")
        if last is not None:
            check_positive(last, name="tau_end", caller=caller)
        first = self._own(ranker) if learned or last is not None else 1.0
        self.register_parameter("log_tau", nn.Parameter(torch.tensor(math.log(first))) if learned else None)

    def _own(self, ranker: Ranker) -> float:
        tau = getattr(ranker, "tau", None)
        if tau is None:
            raise ValueError(f"{self.caller}: only a ranker with a tau, Sigmoid or UpperBound, has a temperature, got {ranker}")
        return float(tau)

    @property
    def changes(self) -> bool:
        """Whether tau is not simply that of the ranker."""
        return self.log_tau is not None or self.fixed is not None

    def value(self, ranker: Ranker) -> float | Tensor:
        """Tau, a tensor with a gradient where it is learned."""
        if self.log_tau is not None:
            return self.log_tau.exp()
        return self._own(ranker) if self.fixed is None else self.fixed

    def set(self, ranker: Ranker, tau: float) -> None:
        """Go on with `tau`."""
        self._own(ranker)
        check_positive(tau, name="tau", caller=self.caller)
        if self.log_tau is not None:
            with torch.no_grad():
                self.log_tau.fill_(math.log(tau))
        else:
            self.fixed = float(tau)

    def score_scale(self, ranker: Ranker) -> float | Tensor | None:
        """What scores are multiplied by; None where tau is that of the ranker."""
        return self._own(ranker) / self.value(ranker) if self.changes else None
