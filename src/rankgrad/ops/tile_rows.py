"""Embeddings as tiles read them, and their gradients as tiles add to them."""

from typing import Protocol

import torch
from torch import Tensor

from rankgrad.ops.cpu_products import add_product_, product
from rankgrad.ops.relevance import inverse_order


class TileRows(Protocol):
    """Embeddings in class order, read by slices; gradients are added by slices."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, rows: slice) -> Tensor: ...

    def zero_grad(self) -> None: ...

    def add_grad(self, rows: slice, gradient: Tensor) -> None: ...

    def add_product_grad(self, rows: slice, left: Tensor, right: Tensor) -> None:
        """`add_grad` of left @ right."""
        ...

    def base_grad(self) -> Tensor:
        """The accumulated gradient, in the caller's order."""
        ...


class DenseRows:
    """The embeddings themselves."""

    def __init__(self, base: Tensor, order: Tensor) -> None:
        self.order = order
        self.values = base.index_select(0, order)
        self.dtype = base.dtype

    def read(self, rows: slice) -> Tensor:
        return self.values[rows]

    def zero_grad(self) -> None:
        self.gradient = torch.zeros_like(self.values)

    def add_grad(self, rows: slice, gradient: Tensor) -> None:
        self.gradient[rows] += gradient

    def add_product_grad(self, rows: slice, left: Tensor, right: Tensor) -> None:
        add_product_(self.gradient[rows], left, right)

    def base_grad(self) -> Tensor:
        return self.gradient.index_select(0, inverse_order(self.order))


class MixedRows:
    """Rows alpha * base[first] + (1 - alpha) * base[second], mixed when they are read and never stored."""

    def __init__(self, base: Tensor, order: Tensor, first: Tensor, second: Tensor, alpha: Tensor) -> None:
        self.base, self.dtype = base, base.dtype
        self.first, self.second = first[order], second[order]
        self.alpha = alpha[order, None].to(base.dtype)

    def read(self, rows: slice) -> Tensor:
        return torch.lerp(self.base[self.second[rows]], self.base[self.first[rows]], self.alpha[rows])

    def zero_grad(self) -> None:
        self.gradient = torch.zeros_like(self.base)

    def add_grad(self, rows: slice, gradient: Tensor) -> None:
        # index_put_ and not index_add_: on a GPU it adds in a fixed order
        self.gradient.index_put_((self.first[rows],), gradient * self.alpha[rows], accumulate=True)
        self.gradient.index_put_((self.second[rows],), gradient * (1 - self.alpha[rows]), accumulate=True)

    def add_product_grad(self, rows: slice, left: Tensor, right: Tensor) -> None:
        self.add_grad(rows, product(left, right))

    def base_grad(self) -> Tensor:
        return self.gradient
