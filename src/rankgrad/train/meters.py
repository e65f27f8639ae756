"""Means and rates that do not make a GPU wait."""

import time

import torch
from torch import Tensor


class Mean:
    """A mean that stays on the device until it is asked for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, value: Tensor) -> None:
        self.total = value.clone() if self.total is None else self.total + value
        self.count += 1

    def value(self) -> float | None:
        return None if self.total is None else float(self.total) / self.count


class Pace:
    """Images per second since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.images, self.start = 0, time.perf_counter()

    def add(self, images: int) -> None:
        self.images += images

    def rate(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.images / max(time.perf_counter() - self.start, 1e-9)
