"""Operands of scores as tensor descriptors, from which a GPU copies tiles without addresses in registers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Which side of a tile an operand is of.
SIDES = {"queries": "BM", "candidates": "BN"}


def described(operands: Mapping[str, Tensor], tile: Mapping[str, int]) -> dict[str, Any]:
    """Descriptors in place of queries and candidates."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return {name: TensorDescriptor.from_tensor(operands[name], [tile[side], tile["BK"]]) for name, side in SIDES.items()}
