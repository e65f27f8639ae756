"""The settings schema, and what recipes of every task share.

A recipe is everything that decides a result, as one frozen, checked value; folders and devices are not part of it. Each field
declared with `setting` is checked on construction, is a flag of the command line, and is saved in RUN/recipe.json.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

from rankgrad._messages import did_you_mean, shorten
from rankgrad.train.settings import Optimizer, Precision, Schedule, TrainSettings

Group: TypeAlias = Literal["data", "images", "batches", "model", "loss", "optimisation", "evaluation", "the run"]
"""Headings of the settings, in the order in which they are listed."""

Source: TypeAlias = Literal["paper", "code", "recalled", "ours"]
"""Where a setting of a published row is from: the paper, the authors' code, memory alone (unverified), or our own choice."""

# an int64: seeds, steps and sizes end up in one
LARGEST_INTEGER = 2**63 - 1

# the k of each data set's columns, as the papers head them
KS = {
    "sop": (1, 10, 100, 1000),
    "inat": (1, 4, 16, 32),
    "cars": (1, 2, 4, 8),
    "cub": (1, 2, 4, 8),
    "vehicleid": (1, 5),
}
VEHICLEID_SPLITS = ("small", "medium", "large")


def setting(
    default: Any,
    help: str,  # noqa: A002  # as argparse calls it
    *,
    group: Group,
    least: float | None = None,
    most: float | None = None,
    choices: Collection[str] | None = None,
) -> Any:
    """Declare a field of a recipe as a setting.

    A closed set of choices is the field's `Literal` type. `int | Literal["auto"]` allows the word beside numbers.

    Args:
        default: value where the recipe gives none.
        help: what it does, in a phrase.
        group: heading under which it is listed.
        least: smallest number allowed.
        most: largest number allowed.
        choices: registry whose names are allowed; `pml:NAME` among them allows any name after the colon.
    """
    return field(default=default, metadata={"help": help, "group": group, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Setting:
    """One entry of the schema, read off a dataclass field.

    Attributes:
        name: of the field.
        kind: type of a single value.
        is_tuple: whether the field holds several values.
        choices: words allowed: all there are for text, beside numbers for an int, () for any text.
        help: what it does, in a phrase.
        group: heading under which it is listed.
        least: smallest number allowed.
        most: largest number allowed.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    is_tuple: bool
    choices: tuple[str, ...]
    help: str
    group: Group
    least: float | None
    most: float | None

    @property
    def description(self) -> str:
        """The help, and the choices where it does not explain them."""
        if self.kind is not str or all(choice in self.help for choice in self.choices):
            return self.help
        return f"{self.help}; one of {', '.join(self.choices)}"

    def check(self, value: Any) -> Any:
        """`value` in the setting's own type; a list becomes a tuple, an integer a float.

        Raises:
            ValueError: the type, the range or the choice is wrong. Names of settings stand in backticks.
        """
        if not self.is_tuple:
            return self._check_one(value)
        if isinstance(value, str) or not isinstance(value, (tuple, list)):
            raise ValueError(f"`{self.name}` must be several values, got {shorten(value)}")
        return tuple(map(self._check_one, value))

    def _check_one(self, value: Any) -> Any:
        if isinstance(value, str) and (value in self.choices or value.startswith(self._prefixes)):
            return value
        if self.kind is str:
            if not isinstance(value, str):
                raise ValueError(f"`{self.name}` must be text, got {shorten(value)}")
            if self.choices:
                near = did_you_mean(value, self.choices, otherwise="", cutoff=0.5)
                hint = f": {near}" if near else ""
                raise ValueError(f"`{self.name}` must be one of {', '.join(self.choices)}, got {shorten(value)}{hint}")
            return value
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"`{self.name}` must be true or false, got {shorten(value)}")
            return value
        return self._check_number(value)

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(f"{choice.partition(':')[0]}:" for choice in self.choices if ":" in choice)

    def _check_number(self, value: Any) -> int | float:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"`{self.name}` must be at most {LARGEST_INTEGER:,}, got {shorten(value)}")
        number: int | float
        if is_integer:
            number = float(value) if self.kind is float else int(value)
        elif self.kind is float and isinstance(value, float) and math.isfinite(value):
            number = value
        else:
            words = "".join(f"{choice!r} or " for choice in self.choices)
            numbers = "a finite number" if self.kind is float else "an integer"
            raise ValueError(f"`{self.name}` must be {words}{numbers}, got {shorten(value)}")
        if (self.least is not None and number < self.least) or (self.most is not None and number > self.most):
            limits = f"at least {self.least:,}" if self.most is None else f"between {self.least:,} and {self.most:,}"
            raise ValueError(f"`{self.name}` must be {limits}, got {number!r}")
        return number

    def parse(self, text: str) -> Any:
        """The value that `text` stands for on a command line, checked; several values are separated by commas."""
        if not self.is_tuple:
            return self.check(self._parse_one(text))
        return self.check(tuple(self._parse_one(part.strip()) for part in text.split(",") if part.strip()))

    def _parse_one(self, text: str) -> Any:
        if self.kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower(), text)
        if self.kind is int:
            # 4,000 would be two values of a tuple, so thousands are written 4000 or 4_000
            return int(text) if re.fullmatch(r"[+-]?[0-9](_?[0-9]){0,40}", text) else text
        if self.kind is float:
            try:
                return float(text)
            except ValueError:
                return text
        return text


def settings_of(recipe: type["Recipe"]) -> Mapping[str, Setting]:
    """The settings of a kind of recipe by name, in the order of their groups."""
    if recipe not in _SCHEMAS:
        _SCHEMAS[recipe] = _read_schema(recipe)
    return _SCHEMAS[recipe]


_SCHEMAS: dict[type["Recipe"], Mapping[str, Setting]] = {}


def _read_schema(recipe: type["Recipe"]) -> Mapping[str, Setting]:
    found = []
    for entry in fields(recipe):
        # a subclass that changes a default alone leaves the declaration to its base
        declared = [base.__dict__.get("__dataclass_fields__", {}).get(entry.name) for base in recipe.__mro__]
        metadata = next((each.metadata for each in declared if each is not None and each.metadata), None)
        if metadata:
            found.append(_read_field(entry, metadata))
    order = get_args(Group)
    return {entry.name: entry for entry in sorted(found, key=lambda entry: order.index(entry.group))}


def _read_field(entry: "Field[Any]", metadata: Mapping[str, Any]) -> Setting:
    kind: Any
    kind, is_tuple = (get_args(entry.type)[0], True) if get_origin(entry.type) is tuple else (entry.type, False)
    words: tuple[str, ...] = tuple(metadata["choices"] or ())
    if get_origin(kind) is Union:
        kind, literal = get_args(kind)
        words = get_args(literal)
    elif get_origin(kind) is Literal:
        kind, words = str, get_args(kind)
    details = {key: metadata[key] for key in ("help", "group", "least", "most")}
    return Setting(name=entry.name, kind=kind, is_tuple=is_tuple, choices=words, **details)


@dataclass(frozen=True)
class Published:
    """A number of a paper, in percent as printed there; None where the paper reports that training diverged."""

    metric: str
    value: float | None
    source: str
    split: str = "test"
    note: str = ""

    @classmethod
    def hits(
        cls, ks: Sequence[int], values: Sequence[float], source: str, *, split: str = "test", note: str = ""
    ) -> tuple[Self, ...]:
        """R@k for each k."""
        return tuple(cls(f"R@{k}", value, source, split, note) for k, value in zip(ks, values, strict=True))

    @classmethod
    def columns(cls, data: str, values: Sequence[float], source: str) -> tuple[Self, ...]:
        """A row under the columns of `data`: R@k, for VehicleID of the small, medium and large list in turn."""
        if data != "vehicleid":
            return cls.hits(KS[data], values, source)
        lists = zip(VEHICLEID_SPLITS, values[0::2], values[1::2], strict=True)
        return tuple(number for split, *pair in lists for number in cls.hits(KS[data], pair, source, split=split))


def sources(**settings: str) -> tuple[tuple[Source, tuple[str, ...]], ...]:
    """Names of settings by where they are from, separated by spaces: `sources(paper="loss dim", code="lr")`."""
    known = get_args(Source)
    for source in settings:
        if source not in known:
            raise ValueError(f"sources: a source must be one of {', '.join(known)}, got {source!r}")
    return tuple((source, tuple(settings[source].split())) for source in known if source in settings)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What recipes of every task share: description, optimisation, and the checks.

    Tasks add fields of their own and change defaults.
    """

    name: str
    what: str = ""
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[tuple[Source, tuple[str, ...]], ...] = ()
    """Which settings are from where; those that are not listed are ours. () for a recipe that is not a row of a paper."""

    data_set: str = setting("folder", "layout of the images", group="data")
    skip_bad: bool = setting(False, "skip what cannot be read, and list it, instead of stopping", group="data")

    optimizer: Optimizer = setting("adam", "optimizer", group="optimisation")
    lr: float = setting(1e-4, "learning rate", group="optimisation", least=1e-12)
    weight_decay: float = setting(4e-4, "weight decay", group="optimisation", least=0.0)
    schedule: Schedule = setting("constant", "learning rate over time", group="optimisation")
    milestones: tuple[int, ...] = setting(
        (), "epochs at which 'step' multiplies the learning rate by gamma", group="optimisation", least=1
    )
    gamma: float = setting(
        0.3, "factor of 'step' at a milestone and of 'exponential' each epoch", group="optimisation", least=1e-6, most=1.0
    )
    warmup_steps: int = setting(0, "steps over which the learning rate rises to lr", group="optimisation", least=0)
    epochs: int = setting(30, "passes over the training data; 0: test the untrained network", group="optimisation", least=0)
    steps: int = setting(0, "number of steps, in place of epochs; 0: epochs decide", group="optimisation", least=0)
    clip: float = setting(0.0, "largest norm of the gradient; 0: no limit", group="optimisation", least=0.0)
    precision: Precision = setting("float32", "of the network; the loss is always computed in float32", group="optimisation")
    chunk_size: int | Literal["auto"] = setting(
        0,
        "images in the network at once; 0: the whole batch; 'auto': as many as fit in memory",
        group="optimisation",
        least=0,
    )

    evaluate_every: int = setting(
        0, "epochs between evaluations while training; 0: only at the end", group="evaluation", least=0
    )

    seed: int = setting(0, "seed of all randomness", group="the run", least=0)
    checkpoint_every: int = setting(
        0, "steps between checkpoints; 0: after an epoch, for at most a tenth of the time", group="the run", least=0
    )
    log_every: int = setting(10, "steps between journal entries", group="the run", least=1)

    before_setting: ClassVar[Mapping[str, Any]] = {}
    """For settings that older run files lack: the value that has their behaviour."""
    locations: ClassVar[frozenset[str]] = frozenset()
    """Settings that say where files are: they make no difference to a result."""
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Settings outside the training loop that may change between two parts of one run: they do not decide what is trained."""

    def __post_init__(self) -> None:
        try:
            for name, entry in settings_of(type(self)).items():
                object.__setattr__(self, name, entry.check(getattr(self, name)))
            self.train_settings()
            self.check_combinations()
        except ValueError as error:
            raise ValueError(f"{self.name}: {_without_caller(str(error))}") from None

    def check_combinations(self) -> None:
        """Refuse settings that exclude each other, beyond those of the training loop."""

    def source_of(self, name: str) -> Source | None:
        """Where a setting is from; None in a recipe that is not a row of a paper."""
        if not self.sources:
            return None
        return next((source for source, names in self.sources if name in names), "ours")

    def settings(self) -> dict[str, Any]:
        """Every setting by name, as JSON has it."""
        values = {name: getattr(self, name) for name in settings_of(type(self))}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        """A checked copy with `changes`. A change of schedule drops the milestones of the old one."""
        known = settings_of(type(self))
        for name in changes:
            if name not in known:
                raise ValueError(f"{self.name}: there is no setting {name!r}: {did_you_mean(name, known)}")
        return replace(self, **{**self._replaced_by(changes), **changes})

    def _replaced_by(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that lose their meaning under `changes`."""
        return {"milestones": ()} if changes.get("schedule", "step") != "step" else {}

    @property
    def trains(self) -> bool:
        """Whether there are any steps; a run without tests the untrained network."""
        return bool(self.epochs or self.steps)

    def differences(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ, with the values here and there."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in settings_of(type(self))}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def identity(self) -> dict[str, Any]:
        """What two parts of one run must agree in besides the settings of the training loop."""
        loop = {entry.name for entry in fields(TrainSettings)}
        decisive = {name: value for name, value in self.settings().items() if name not in loop | self.mutable_on_resume}
        # equal to what older checkpoints say, which do not have these settings
        return {name: value for name, value in decisive.items() if (name, value) not in self.before_setting.items()}

    def train_settings(self, **context: Any) -> TrainSettings:
        """The settings of the training loop; `context` are those that say where it runs."""
        shared = {entry.name for entry in fields(TrainSettings)} & set(settings_of(type(self)))
        values = {name: getattr(self, name) for name in shared}
        # a number of steps replaces the number of epochs
        # of a run that does not train only the other settings are looked at
        values["epochs"] = 0 if self.steps else self.epochs or 1
        return TrainSettings(**{**values, **self._loop_settings(), **context})

    def _loop_settings(self) -> dict[str, Any]:
        """Settings of the training loop that the recipe has under another name, or that follow from others."""
        return {}

    def debug_version(self, *, has_data: bool = True) -> Self:
        """A copy in which every stage runs within a minute on a CPU; its results mean nothing.

        Args:
            has_data: whether the user has the data set; False may replace it by a built-in one.
        """
        raise NotImplementedError


def flag_of(name: str) -> str:
    """`--batch-size` for batch_size."""
    return f"--{name.replace('_', '-')}"


def format_value(value: object) -> str:
    """The value of a setting as the command line takes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(format_value, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_caller(message: str) -> str:
    """Drop the name of the class that a check of ours begins with."""
    return re.sub(r"^[A-Z]\w+: ", "", message)
