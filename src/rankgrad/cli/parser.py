"""Parsers: every setting of a recipe is a flag, and a wrong flag is answered in one sentence."""

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch

import rankgrad
from rankgrad._messages import did_you_mean
from rankgrad.runs.recipe import Recipe, flag_of, format_value, settings_of

QUOTES = "'\""


def device_named(name: str) -> torch.device:
    """The device of `--device NAME`; "auto" is a GPU where there is one. `cuda:N` becomes the current GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no GPU here")
    if device.type == "cuda" and device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise ValueError(f"--device {name}: the last GPU here is cuda:{count - 1}")
        # Triton launches kernels on the current GPU, whichever holds their tensors
        torch.cuda.set_device(device)
    return device


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one sentence, with a suggestion, and exits with status 2."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but suggests a flag for an unknown one."""
        # the value of an unknown flag may look like a positional argument, so check the flags first
        for argument in arguments:
            if argument == "--":
                break
            flag, _, value = argument.partition("=")
            if flag.startswith("--") and flag not in self._option_string_actions:
                hint = did_you_mean(flag, self._option_string_actions, cutoff=0.65, otherwise="--help lists all")
                self.error(f"unknown flag {flag}: {hint}")
            if flag.startswith("--") and value == "--":
                # argparse would take it for the end of the flags
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
    kind: type[Recipe],
    defaults: Recipe | None = None,
    *,
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for each setting of a kind of recipe; flags that are not given leave no trace in the result.

    Args:
        parser: gets the flags, in groups.
        kind: of recipe.
        defaults: whose values the help shows.
        only: names of the settings to add, by default all.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, setting in settings_of(kind).items():
        if only is not None and name not in only:
            continue
        group = groups.get(setting.group) or groups.setdefault(setting.group, parser.add_argument_group(setting.group))
        words = "|".join(setting.choices) if setting.kind is str else ""
        is_short = 0 < len(words) < 60
        text = in_flags(setting.help if is_short else setting.description, settings_of(kind)).replace("%", "%%")
        shown = "" if defaults is None else format_value(getattr(defaults, name))
        if shown not in ("", "-"):
            text += f" [{shown.replace('%', '%%')}]"
        if setting.kind is bool:
            group.add_argument(
                flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar = f"{{{words}}}" if is_short else name.upper()
            group.add_argument(flag_of(name), dest=name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def changed_settings(parsed: argparse.Namespace, kind: type[Recipe]) -> dict[str, Any]:
    """The settings that the command line gave, parsed and checked one by one."""
    known = settings_of(kind)
    given = {name: value for name, value in vars(parsed).items() if name in known}
    return {name: value if isinstance(value, bool) else known[name].parse(value) for name, value in given.items()}


def without_caller(message: str) -> str:
    """`message` without the name of the function or class of the library that it begins with."""
    name, colon, rest = message.partition(": ")
    is_name = name.isidentifier() and not name.isupper() and ("_" in name or not name.islower() or hasattr(rankgrad, name))
    return rest if colon and is_name else message


def in_flags(message: str, settings: Collection[str]) -> str:
    """`message` with settings as a user gives them: `batch_size` becomes --batch-size, `crop='center'` --crop center."""

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in settings:
            return match.group(0)
        if value in ("True", "False"):
            return flag_of(name) if value == "True" else flag_of(f"no_{name}")
        return flag_of(name) if value is None else f"{flag_of(name)} {value.strip(QUOTES)}"

    # in backticks; without them names of two words, which are no English
    long_names = "|".join(name for name in settings if "_" in name)
    message = re.sub(r"`(\w+)(?:=([^`]*))?`", flag, message)
    return re.sub(rf"(?<![\w/.`-])({long_names})(?:=('[^']*'|\w+))?(?![\w/.]*[\w/])", flag, message)
