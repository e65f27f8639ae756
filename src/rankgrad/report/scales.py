"""From values to places on an axis, and the values an axis names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`low` to `high` in the data are `start` to `end` on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Round values inside the scale, about so many."""
        return log_ticks(self.low, self.high, about) if self.log else round_ticks(self.low, self.high, about)


def span(values: Sequence[float], *, room: float = 0.04) -> tuple[float, float]:
    """Ends of an axis for `values`, with some room, never of length 0; below 0 only where a value is."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    around = room * (high - low) or abs(low) / 2 or 0.5
    return (max(low - around, 0.0) if low >= 0 else low - around), high + around


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # a multiple carries the rounding of its step: 0.30000000000000004
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten, with their doubles and fivefolds where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        inside = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(inside) <= about:
            return inside
    return inside[:: math.ceil(len(inside) / about)]
