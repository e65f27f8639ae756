"""Named losses of the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rankgrad.losses.rank_loss import RankLoss


@dataclass(frozen=True)
class Preset:
    """A named loss of the command line."""

    loss: Callable[..., RankLoss]
    settings: Mapping[str, str]  # constructor argument -> name of the setting it is given by

    def build(self, settings: Any, **options: Any) -> RankLoss:
        """The loss with the attributes of `settings` as arguments, and `options` of any `RankLoss`."""
        return self.loss(**{argument: getattr(settings, setting) for argument, setting in self.settings.items()}, **options)


PRESETS: dict[str, Preset] = {}

L = TypeVar("L", bound=RankLoss)


def preset(name: str, **settings: str) -> Callable[[type[L]], type[L]]:
    """Register a loss as `name`; each keyword is a constructor argument and names the setting that provides it."""

    def register(loss: type[L]) -> type[L]:
        PRESETS[name] = Preset(loss, settings)
        return loss

    return register
