"""Randomness without state: every random choice is a function of a seed and of what it is for.

    generator(seed, "augment", epoch, step)      the same numbers on every machine, in every process, after every restart

No global random state is read or changed, so a resumed run needs no saved generator.
"""

import hashlib
import operator

import numpy as np
import torch
from numpy.typing import NDArray


def derive(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits from `seed` and the purpose `parts`: equal for equal arguments, unrelated for any others.

    Strings and integers never stand for each other: `derive(0, 1)` and `derive(0, "1")` differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *parts):
        digest.update(_encoded(part))
    return int.from_bytes(digest.digest(), "big") >> 1


def generator(seed: int, *parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator of its own for the purpose `parts`."""
    return torch.Generator(device).manual_seed(derive(seed, *parts))


def bits(seed: int, *parts: int | str) -> "np.random.PCG64":
    """A numpy stream of its own for the purpose `parts`."""
    return np.random.PCG64(derive(seed, *parts))


def permutation(count: int, stream: "np.random.PCG64") -> NDArray[np.int64]:
    """0 .. count - 1 in random order.

    numpy promises the raw stream of a bit generator for ever, but not what `Generator.permutation` makes of it.
    """
    return np.argsort(stream.random_raw(count), kind="stable")


def _encoded(part: int | str) -> bytes:
    if isinstance(part, str):
        text, kind = part.encode(), b"s"
    else:
        try:
            text, kind = str(int(operator.index(part))).encode(), b"i"
        except TypeError:
            raise TypeError(f"derive: parts must be integers or strings, got {part!r} of type {type(part).__name__}") from None
    # the length in front keeps ("ab", "c") and ("a", "bc") apart
    return kind + str(len(text)).encode() + b":" + text
