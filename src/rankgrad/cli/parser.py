"""A command line from the settings of a recipe: every setting a flag, and a sentence with the nearest one for a wrong flag."""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from rankgrad.recipes.catalogue import shown
from rankgrad.runs.recipe import GROUPS, SETTINGS, Recipe, parse

Settings: TypeAlias = Mapping[str, Any]
"""Of a recipe of any kind, by name: dataclass fields made by `setting`."""


def flag_of(setting: str) -> str:
    """`--batch-size` for batch_size."""
    return f"--{setting.replace('_', '-')}"


def device_named(name: str) -> torch.device:
    """What `--device NAME` means; "auto" is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no GPU here")
    return device


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence, with a suggestion, and status 2."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, and an unknown flag is answered with the nearest known one."""
        # what follows a wrong flag may look like a positional argument, so flags are looked at first
        for argument in arguments:
            if argument == "--":
                break
            flag, _, value = argument.partition("=")
            if flag.startswith("--") and flag not in self._option_string_actions:
                near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.65)
                self.error(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else "; --help lists all"))
            if flag.startswith("--") and value == "--":
                # argparse would take it for the end of the flags, and the flag for one of many values
                self.error(f"{flag} needs a value, got '--'")
        return self.parse_args(list(arguments))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            print(message.rstrip("\n"), file=sys.stderr)
        raise SystemExit(status)


def add_settings(
    parser: argparse.ArgumentParser,
    defaults: Any = None,
    *,
    settings: Settings = SETTINGS,
    groups: Mapping[str, str] = GROUPS,
) -> None:
    """One flag per setting; what is not given leaves no trace in the result, so that a recipe's own value stays."""
    group: argparse.ArgumentParser | argparse._ArgumentGroup = parser
    for name, entry in settings.items():
        if name in groups:
            group = parser.add_argument_group(groups[name])
        about = entry.metadata["about"].replace("%", "%%")
        if defaults is not None:
            about += f" [{shown(getattr(defaults, name))}]"
        if entry.type is bool:
            group.add_argument(
                flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=about
            )
        else:
            words = "|".join(entry.metadata["choices"]) if entry.type is str else ""
            metavar = f"{{{words}}}" if words and len(words) < 60 else name.upper()
            group.add_argument(flag_of(name), dest=name, metavar=metavar, default=argparse.SUPPRESS, help=about)


def changed_settings(parsed: argparse.Namespace, settings: Settings = SETTINGS) -> dict[str, Any]:
    """The settings that the command line gave, parsed and checked one by one."""
    given = {name: value for name, value in vars(parsed).items() if name in settings}
    return {name: value if isinstance(value, bool) else parsed_flag(settings, name, value) for name, value in given.items()}


def parsed_flag(settings: Settings, name: str, text: str) -> Any:
    """The value of one flag; a complaint names the flag."""
    try:
        return parse(settings[name], text)
    except ValueError as error:
        # the sentence begins with the setting's name
        raise ValueError(flag_of(name) + str(error).removeprefix(name)) from None


def as_flags(recipe: Recipe, base: Recipe) -> list[str]:
    """The flags that turn `base` into `recipe`."""
    flags = []
    for name, (value, _) in recipe.differences(base).items():
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"{flag_of(name)}={text}")
    return flags
