"""Names that go away: they keep working for two minor versions and say what to write instead.

    @renamed_arguments("0.2", temperature="tau")         SmoothAPLoss(temperature=0.01) still works, and warns
    def __init__(self, tau): ...

    @deprecated("0.2", "use rankgrad.evaluate")          for a function or a class without a successor of the same form
    def recall_at(...): ...

`FutureWarning` and not `DeprecationWarning`, which Python hides from whoever calls a library from another module. Every use is
listed in `DEPRECATIONS`; a test fails once the version is reached in which one should be gone.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

# Minor versions that a deprecated name stays.
VERSIONS_KEPT = 2

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Deprecation:
    """A name that goes away, the version that said so first, and what to use instead."""

    name: str
    since: str
    instead: str

    @property
    def removed_in(self) -> str:
        major, minor = map(int, self.since.split(".")[:2])
        return f"{major}.{minor + VERSIONS_KEPT}"

    def warn(self) -> None:
        # level 3: the line that called the deprecated function
        text = f"{self.name} is deprecated since rankgrad {self.since} and will be removed in {self.removed_in}: {self.instead}"
        warnings.warn(text, FutureWarning, stacklevel=3)


DEPRECATIONS: list[Deprecation] = []


def _declare(name: str, since: str, instead: str) -> Deprecation:
    deprecation = Deprecation(name, since, instead)
    DEPRECATIONS.append(deprecation)
    return deprecation


def deprecated(since: str, instead: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Mark a function or a method: a call warns and goes on. For a class, decorate its `__init__`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        deprecation = _declare(_public_name(function), since, instead)

        @functools.wraps(function)
        def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            deprecation.warn()
            return function(*args, **kwargs)

        return wrapper

    return decorate


def renamed_arguments(since: str, **new_names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Accept keyword arguments by their old names, given as old="new", and warn."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        caller = _public_name(function)
        renamed = {old: (new, _declare(f"{caller}({old}=)", since, f"use {new}=")) for old, new in new_names.items()}

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Result:
            for old in kwargs.keys() & renamed.keys():
                new, deprecation = renamed[old]
                if new in kwargs:
                    raise TypeError(f"{caller}: {old} is the former name of {new}, got both; remove {old}")
                deprecation.warn()
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _public_name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
