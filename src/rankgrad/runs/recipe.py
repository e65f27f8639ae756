"""What decides a result, as one frozen, checked value. Where it runs (folders, devices) is not in here.

Every field made by `setting` is a flag of `rankgrad train`, is checked on construction and is written to RUN/recipe.json.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, get_args, get_origin

DATA_SETS = (
    "sop",
    "inshop",
    "vehicleid",
    "inat",
    "cub",
    "cars",
    "gldv1",
    "roxford5k",
    "rparis6k",
    "omniglot",
    "folder",
    "csv",
    "glyphs",
)
# what a seed, a number of steps or a size can be anywhere it goes
LARGEST_INTEGER = 2**63 - 1
CATEGORY_SAMPLERS = ("category-hard", "category-half")


def setting(
    default: Any, about: str, *, choices: tuple[str, ...] = (), least: float | None = None, most: float | None = None
) -> Any:
    """A field with its help text and what it may hold. `choices` of an int field are words allowed beside numbers."""
    return field(default=default, metadata={"about": about, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True)
class Published:
    """A number of a paper, in percent as printed there; None where the paper reports that training diverged."""

    metric: str
    value: float | None
    source: str
    split: str = "test"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, whole: data, batches, model, loss, optimisation, evaluation.

    The defaults are those for images of one's own. Where a paper and its published code disagree the default is the paper's
    reading and the field says what the code does.
    """

    name: str
    what: str = ""
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()

    # data
    data_set: str = setting("folder", "layout of the images", choices=DATA_SETS)
    test_on: tuple[str, ...] = setting(
        (), "other data sets to test on, each in DIR/<name>; empty: the data set's own test splits", choices=DATA_SETS
    )
    partial: bool = setting(False, "accept an incomplete copy of the data set, saying what is absent")
    skip_bad: bool = setting(False, "leave unreadable images out, listing them, and not stop at the first")
    classes: int = setting(0, "use only so many classes of each split, spread over the categories; 0: all", least=0)
    images_per_class: int = setting(0, "use only the first images of each class; 0: all", least=0)

    # images
    size: int = setting(224, "side of the square the network sees, pixels", least=16, most=2048)
    stored_side: int = setting(0, "side the decoded images are kept at; 0: size x 256 / 224", least=0, most=4096)
    decode: str = setting(
        "once",
        "'once': all images beforehand, kept in the cache; 'always': whenever one is shown, for sets too large to keep",
        choices=("once", "always"),
    )
    aspect: str = setting(
        "kept", "'kept': the short side becomes stored_side; 'square': both do, distorted", choices=("kept", "square")
    )
    crop: str = setting(
        "resized",
        "training crops: 'resized' of random scale and shape, 'random' of fixed size, 'center'",
        choices=("resized", "random", "center"),
    )
    crop_scale: float = setting(0.08, "smallest share of the image's area in a 'resized' crop", least=0.01, most=1.0)
    flip: bool = setting(True, "mirror every other training image")

    # batches
    sampler: str = setting(
        "class-balanced",
        "'class-balanced': per_class images of each class; 'whole-class': all images of random classes; 'category-hard': "
        "every batch from two categories; 'category-half': one labelled category and unlabelled images",
        choices=("class-balanced", "whole-class", *CATEGORY_SAMPLERS),
    )
    batch_size: int = setting(
        0, "images in a batch; 0: per_class x the classes that have so many images, 4,000 at most", least=0
    )
    per_class: int = setting(4, "images of a class in a batch; 0: all it has (not for class-balanced)", least=0)
    batches_per_pair: int = setting(5, "batches of each pair of categories in an epoch (category-hard)", least=1)

    # model
    trunk: str = setting("resnet50", "resnet18/34/50/101, googlenet, convnet, vit-b32, vit-b16, vit-s16 or a name of timm")
    weights: str = setting("default", "'default': the trunk's published weights; 'none': random; or a file")
    pool: str = setting(
        "auto",
        "what makes a vector of the trunk's features; 'auto': the class token where there is one, else gem",
        choices=("auto", "gem", "avg", "max", "cls"),
    )
    gem_p: float = setting(3.0, "first exponent of GeM pooling", least=1e-3, most=100.0)
    gem_learned: bool = setting(True, "learn GeM's exponent")
    l2_pooled: bool = setting(False, "length 1 between pooling and the linear layer, which landmark models have")
    layer_norm: bool = setting(True, "layer norm between pooling and the linear layer")
    dim: int = setting(512, "dimensions of an embedding; 0: those of the trunk, without linear layer", least=0)
    # RS@k's text says that batch norm parameters are frozen; its code fixes the statistics and trains scale and shift
    batch_norm: str = setting(
        "frozen",
        "'frozen': statistics stay, scale and shift are trained; 'fixed': nothing is; 'live': as usual, whole batches only",
        choices=("frozen", "fixed", "live"),
    )
    pixels: str = setting(
        "native", "normalise pixels as the trunk was trained, or as ImageNet models are", choices=("native", "imagenet")
    )
    whiten: bool = setting(False, "begin with the linear layer at the learned whitening of the training images")

    # loss
    loss: str = setting(
        "recall-at-k",
        "what is optimised",
        choices=("fastap", "rambo-recall", "rambo-ap", "recall-at-k", "smooth-ap"),
    )
    bins: int = setting(10, "bins of fastap's histogram", least=1)
    lam: float = setting(4.0, "rambo's interpolation, on ranks divided by the list's length", least=1e-9)
    margin: float = setting(0.02, "rambo's margin between relevant and other scores", least=0.0)
    weighting: str = setting("loglog", "rambo-recall's weighting of ranks", choices=("log", "loglog"))
    tau: float = setting(0.01, "temperature on score differences (recall-at-k, smooth-ap)", least=1e-9)
    tau_cut: float = setting(1.0, "temperature on ranks (recall-at-k)", least=1e-9)
    ks: tuple[int, ...] = setting((1, 2, 4, 8, 16), "cut-offs of recall-at-k; simix widens the default set", least=1)
    # eq. 6 of RS@k leaves the query out; the published code, and so every published number, has it in
    query_in_database: bool = setting(False, "recall-at-k: rank the query in its own list, as the published code does")
    simix: bool = setting(False, "add virtual examples between all pairs of a class")
    memory: int = setting(0, "batches whose embeddings lengthen the ranked lists", least=0)

    # optimisation
    optimizer: str = setting("adam", "optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = setting(1e-4, "learning rate", least=1e-12)
    head_lr: float = setting(1.0, "learning rate of the embedding layer, as a multiple of lr", least=0.0)
    gem_lr: float = setting(1.0, "learning rate of GeM's exponent, as a multiple of lr", least=0.0)
    weight_decay: float = setting(4e-4, "weight decay", least=0.0)
    decay_norms: bool = setting(True, "decay norms and biases too")
    decay_gem: bool = setting(False, "decay GeM's exponent too")
    schedule: str = setting("constant", "learning rate over time", choices=("constant", "step", "cosine", "exponential"))
    milestones: tuple[int, ...] = setting((), "epochs at which 'step' multiplies by gamma", least=1)
    gamma: float = setting(0.3, "factor of 'step' at a milestone and of 'exponential' each epoch", least=1e-6, most=1.0)
    warmup: float = setting(0.0, "epochs over which the learning rate rises to lr", least=0.0)
    warmup_steps: int = setting(0, "the same in steps; one of the two", least=0)
    epochs: int = setting(30, "passes through the sampler", least=1)
    steps: int = setting(0, "stop after so many steps, whatever the epoch; 0: epochs decide", least=0)
    clip: float = setting(0.0, "largest norm of the gradient; 0: any", least=0.0)
    precision: str = setting("float32", "of the network; the loss is float32 in any case", choices=("float32", "bf16", "fp16"))
    compile: bool = setting(False, "torch.compile the network")
    cuda_graphs: bool = setting(True, "record the network's pass over a batch that is one chunk, on a GPU")
    channels_last: bool = setting(True, "memory format of network and images, faster for convolutions")
    chunk_size: int | str = setting(
        0, "images in the network at once; 0: the whole batch; 'auto': what memory allows", choices=("auto",), least=0
    )
    keep: int | str = setting("auto", "chunks whose activations are kept and not computed again", choices=("auto",), least=0)

    # evaluation
    validation: str = setting(
        "none",
        "what chooses the best checkpoint: 'half': train on the first half of the classes, validate on the second; 'split': "
        "the data set's own validation split; 'test': the test classes, as some papers did; 'none': the last is taken",
        choices=("none", "half", "split", "test"),
    )
    evaluate_every: int = setting(5, "epochs between validations; 0: only at the end", least=0)
    patience: int = setting(0, "validations without improvement after which training ends; 0: never", least=0)
    scales: tuple[float, ...] = setting((1.0,), "sizes at which a test image is described, relative to its own", least=0.05)

    # the run
    seed: int = setting(0, "of everything random", least=0)
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: each epoch", least=0)
    log_every: int = setting(10, "steps between lines of the journal", least=1)

    def __post_init__(self) -> None:
        for entry in settings_of(Recipe):
            object.__setattr__(self, entry.name, checked(entry, getattr(self, entry.name)))
        for problem in self._contradictions():
            raise ValueError(f"{self.name}: {problem}")

    def _contradictions(self) -> list[str]:
        found = []
        if self.sampler == "class-balanced":
            if self.per_class < 2:
                found.append(f"per_class must be at least 2 for the sampler 'class-balanced', got {self.per_class}")
            elif self.batch_size % self.per_class:
                lower = self.batch_size - self.batch_size % self.per_class
                found.append(
                    f"batch_size must be a multiple of per_class ({self.per_class}), got {self.batch_size}; "
                    f"{lower or self.per_class} or {lower + self.per_class} is"
                )
        elif self.batch_size == 0:
            found.append(f"batch_size must be given for the sampler {self.sampler!r}")
        if self.batch_size == 1:
            found.append("batch_size must be at least 2: a single image has nothing to be ranked against")
        if self.simix and self.memory:
            found.append("simix and memory exclude each other: set memory to 0 or use no simix")
        whole = self.chunk_size == 0 or (isinstance(self.chunk_size, int) and 0 < self.batch_size <= self.chunk_size)
        if self.batch_norm == "live" and not whole:
            found.append(
                f"batch_norm 'live' needs the whole batch at once, but chunk_size is {self.chunk_size}: "
                "use batch_norm 'frozen' or chunk_size 0"
            )
        if (self.schedule == "step") != bool(self.milestones):
            found.append(
                "schedule 'step' needs milestones, the epochs at which the learning rate falls"
                if self.schedule == "step"
                else f"milestones {', '.join(map(str, self.milestones))} need the schedule 'step', got {self.schedule!r}"
            )
        if self.milestones != tuple(sorted(set(self.milestones))):
            found.append(f"milestones must ascend, got {', '.join(map(str, self.milestones))}")
        if self.warmup and self.warmup_steps:
            found.append("warmup and warmup_steps both say how long the learning rate rises: use one of the two")
        if self.l2_pooled and self.layer_norm:
            found.append("layer_norm undoes the length that l2_pooled gives: use one of the two")
        if self.whiten and not self.dim:
            found.append("whiten needs a linear layer to start: give dim")
        if self.stored_side and self.stored_side < self.size:
            found.append(f"stored_side must be at least size ({self.size}), got {self.stored_side}")
        if self.skip_bad and self.decode == "always":
            found.append("skip_bad needs decode 'once': only then are bad images known before training")
        if self.data_set == "glyphs" and self.test_on:
            found.append("test_on is for data sets on disk; glyphs has test characters of its own")
        return found

    @property
    def stored(self) -> int:
        """Side of the decoded images."""
        return self.stored_side or round(self.size * 256 / 224)

    def settings(self) -> dict[str, Any]:
        """Every setting by name, as JSON has it."""
        values = {entry.name: getattr(self, entry.name) for entry in settings_of(Recipe)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def with_settings(self, changes: Mapping[str, Any]) -> "Recipe":
        """A copy with `changes`, checked; a name that is no setting is an error with the nearest one.

        A change of schedule drops the milestones of the one before, a warm-up in one unit that in the other.
        """
        for name in changes:
            if name not in SETTINGS:
                raise ValueError(f"{self.name}: there is no setting {name!r}{nearest(name, SETTINGS)}")
        dropped: dict[str, Any] = {}
        if changes.get("schedule", "step") != "step":
            dropped["milestones"] = ()
        if changes.get("warmup"):
            dropped["warmup_steps"] = 0
        elif changes.get("warmup_steps"):
            dropped["warmup"] = 0.0
        return replace(self, **{**dropped, **changes})

    def differences(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Settings that are not the same, with the values here and there."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in SETTINGS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_of(recipe: type[Recipe]) -> list["Field[Any]"]:
    """The fields that are settings, in order."""
    return [entry for entry in fields(recipe) if "about" in entry.metadata]


def nearest(name: str, names: Any) -> str:
    """The end of a sentence about an unknown name."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""


def told(value: Any) -> str:
    """A wrong value in a sentence, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def checked(entry: "Field[Any]", value: Any) -> Any:
    """`value` in the field's own type and range, or a sentence about why not. Lists (from JSON) become tuples."""
    if get_origin(entry.type) is tuple:
        if isinstance(value, str) or not isinstance(value, (tuple, list)):
            raise ValueError(f"{entry.name} must be several values, got {told(value)}")
        return tuple(_checked_one(entry, get_args(entry.type)[0], item) for item in value)
    return _checked_one(entry, entry.type, value)


def _checked_one(entry: "Field[Any]", kind: Any, value: Any) -> Any:
    choices, least, most = (entry.metadata[key] for key in ("choices", "least", "most"))
    if kind == int | str and value in choices:
        return value
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{entry.name} must be text, got {told(value)}")
        if choices and value not in choices:
            raise ValueError(f"{entry.name} must be one of {', '.join(choices)}, got {told(value)}{nearest(value, choices)}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{entry.name} must be true or false, got {told(value)}")
        return value
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{entry.name} must be at most {LARGEST_INTEGER:,}, got {told(value)}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wanted = float if kind is float else int
    if not isinstance(value, wanted) or isinstance(value, bool) or not math.isfinite(value):
        words = "".join(f"{choice!r} or " for choice in choices)
        numbers = "a finite number" if wanted is float else "an integer"
        raise ValueError(f"{entry.name} must be {words}{numbers}, got {told(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        limits = f"between {least:,} and {most:,}" if most is not None else f"at least {least:,}"
        raise ValueError(f"{entry.name} must be {limits}, got {value!r}")
    return value


def parse(entry: "Field[Any]", text: str) -> Any:
    """The value that `text` of a command line stands for; tuples are separated by commas."""
    if get_origin(entry.type) is tuple:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return checked(entry, tuple(_parse_one(entry, get_args(entry.type)[0], part) for part in parts))
    return checked(entry, _parse_one(entry, entry.type, text))


def _parse_one(entry: "Field[Any]", kind: Any, text: str) -> Any:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise ValueError(f"{entry.name} must be true or false, got {told(text)}")
        return words[text.lower()]
    if kind is int or kind == int | str:
        # 4,000 is two values in a tuple, so thousands are written 4000 or 4_000
        return int(text) if re.fullmatch(r"[+-]?[0-9](_?[0-9]){0,40}", text) else text
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text


SETTINGS: Mapping[str, "Field[Any]"] = {entry.name: entry for entry in settings_of(Recipe)}

# the first setting of each group of the help text
GROUPS = {
    "data_set": "data",
    "size": "images",
    "sampler": "batches",
    "trunk": "model",
    "loss": "loss",
    "optimizer": "optimisation",
    "validation": "evaluation",
    "seed": "the run",
}
