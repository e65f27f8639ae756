"""What a run is of, as the pipeline sees it: the protocol that retrieval, detection and later tasks implement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.recipe import Published
from rankgrad.train.large_batch import Loss
from rankgrad.train.loop import Batches, Evaluator
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.sharding import Parallel

VALIDATION = "validation"
# the task of run files that name none
RETRIEVAL = "retrieval"


@dataclass(frozen=True)
class RunContext:
    """Where and how a run is executed: what may differ between two runs with the same result.

    Attributes:
        data: folder or file of the data.
        device: where to compute.
        cache: folder for decoded images, None to keep them in memory.
        workers: threads that decode, None for the task's own choice.
        tensorboard: "auto" writes curves where the package is installed.
        wandb: project at Weights & Biases, empty for none.
        trackio: project of trackio, empty for none.
        mlflow: experiment of MLflow, empty for none.
        processes: those that train together.
        parallel: how several processes share the model.
    """

    data: Path | None
    device: torch.device
    cache: Path | None = None
    workers: int | None = None
    tensorboard: Literal["auto", "on", "off"] = "off"
    wandb: str = ""
    trackio: str = ""
    mlflow: str = ""
    processes: Processes = ALONE
    parallel: Parallel = "ddp"
    _noted: set[str] = field(default_factory=set, repr=False, compare=False)

    def say(self, text: str) -> None:
        """Print a line, on the first process."""
        if self.processes.first:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Print a note; a second one with the same text is not printed again, however many runs share the context."""
        if text not in self._noted:
            self._noted.add(text)
            self.say(f"note: {text}")


@dataclass(frozen=True)
class TestIdentity:
    """What a result depends on besides the weights: results that differ in it are not comparable.

    Attributes:
        data: digest of the images that are tested on.
        protocol: name of the rules.
        is_default: whether these are the rules of the data set itself.
    """

    __test__ = False  # not a test, whatever pytest makes of the name

    data: str
    protocol: str
    is_default: bool = True


class SplitResult(Protocol):
    """The result of a model on one split; on processes other than the first the metrics are empty."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def protocol(self) -> str: ...

    @property
    def headline(self) -> Sequence[str]:
        """Names of the metrics that tables show."""
        ...

    @property
    def details(self) -> str:
        """What to print above the table, such as a line for each class."""
        ...

    def intervals(self) -> Mapping[str, tuple[float, float]]:
        """95% confidence intervals, where the task has them."""
        ...

    def write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write result.json, with the entries of `extra`, and what it was computed from.

        Called by all processes; the first writes.
        """
        ...


class EvaluateSplit(Protocol):
    """Tests one model on one split after another."""

    def __call__(self, split: str, *, protocol: str | None, scratch: Path) -> SplitResult:
        """The result on a split. `scratch` is where it will be written, for arrays too large for memory."""
        ...


class Task(Protocol):
    """What a run is of. Made from a recipe and a context; tasks with the same data share what they have opened."""

    name: str
    """What RUN/recipe.json calls it."""
    command: str
    """What trains it on the command line."""
    untrained_is_baseline: bool
    """Whether the result of the untrained network says anything."""
    outputs_are_embeddings: bool
    """Whether the model's outputs are unit embeddings, one for each image."""
    recipe: Any
    context: RunContext

    @property
    def has_data(self) -> bool:
        """Whether the context says where the data is, or none is needed."""
        ...

    def with_recipe(self, recipe: Any) -> Self:
        """The same task with other settings and the same opened data, for the runs of a sweep or study."""
        ...

    def notes(self) -> Sequence[str]:
        """What the user should know about the data."""
        ...

    def data_identity(self) -> Mapping[str, DataIdentity]:
        """The splits that the run depends on."""
        ...

    def data_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Sizes of the splits, for the journal."""
        ...

    def run_file_entries(self) -> Mapping[str, Any]:
        """What else to save in RUN/recipe.json, such as class names."""
        ...

    def published(self) -> Sequence[Published]:
        """Numbers to compare the result with."""
        ...

    def make_model(self, *, pretrained: bool) -> nn.Module:
        """The model with its first weights; False where a checkpoint brings all of them."""
        ...

    def initialise(self, model: nn.Module) -> None:
        """Set weights that depend on the data, in a new run only."""
        ...

    def param_groups(self, model: nn.Module, loss: Loss) -> list[dict[str, Any]] | None:
        """Parameter groups of model and loss; None for all parameters in one."""
        ...

    def make_loss(self) -> Loss:
        """The loss, for the processes of the context."""
        ...

    def warm_up(self) -> Callable[[], None] | None:
        """Begin in a thread what the first step would wait for, and return what waits for its end; None: there is nothing."""
        ...

    def make_batches(self) -> Batches:
        """The training batches of this process."""
        ...

    def sample_batch(self) -> tuple[Any, Tensor]:
        """Inputs and labels of one batch, without data where possible."""
        ...

    def evaluators(self) -> Mapping[str, Evaluator]:
        """By split, what is measured while training."""
        ...

    def selected_on(self) -> str | None:
        """The evaluator that selects the best checkpoint."""
        ...

    def test_splits(self) -> Sequence[str]:
        """Names of the splits there are to test on."""
        ...

    def test_identity(self, split: str, protocol: str | None = None) -> TestIdentity:
        """What the result on a split depends on."""
        ...

    def make_evaluator(self, model: nn.Module) -> EvaluateSplit:
        """What tests the model on one split after another."""
        ...

    def combine(self, results: Mapping[str, SplitResult]) -> Mapping[str, Mapping[str, float]]:
        """Metrics over several splits, under the names with which they are published."""
        ...
