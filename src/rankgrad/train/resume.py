"""Where a run stands: its position and result, the proof that a resumed run is the same one, and the state that is restored."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankgrad.data.seeds import derive
from rankgrad.train.checkpoints import Checkpoint, CheckpointStore, folder_name
from rankgrad.train.large_batch import unwrap_loss
from rankgrad.train.processes import Processes
from rankgrad.train.sharding import unwrap_model
from rankgrad.train.train_step import TrainStep

TRAIN_FURTHER = "To train it further, start a new run from its weights (--weights RUN), or resume it with more --epochs."


@dataclass
class LoopState:
    """Position of a run, and the best evaluation so far."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    best: dict[str, Any] | None = None
    evaluations_since_best: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def epoch_number(self) -> int:
        """Counted from 1; a finished epoch counts until the next one begins."""
        return self.epoch + 1 if self.in_epoch or not self.epoch else self.epoch

    def update_best(self, metrics: Mapping[str, float], metric: str, *, selected_on: str) -> bool:
        """Records an evaluation that selects; True if it is the best so far."""
        if metric not in metrics:
            raise ValueError(f"fit: metric must be one of {sorted(metrics)}, which {selected_on!r} evaluates, got {metric!r}")
        so_far = -math.inf if self.best is None else self.best["metrics"][metric]
        if not metrics[metric] > so_far:
            self.evaluations_since_best += 1
            return False
        self.evaluations_since_best = 0
        self.best = {
            "folder": folder_name(self.step),
            "step": self.step,
            "epoch": self.epoch_number,
            "metrics": dict(metrics),
            "metric": metric,
            "selected_on": selected_on,
        }
        return True

    def as_dict(self) -> dict[str, Any]:
        values = dict(vars(self))
        values["stale"] = values.pop("evaluations_since_best")
        return values

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "LoopState":
        values = dict(saved)
        values["evaluations_since_best"] = values.pop("stale")
        state = cls(**values)
        counts = (state.step, state.epoch, state.in_epoch, state.evaluations_since_best)
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(state.metrics, dict):
            raise ValueError(f"its position is {saved!r}")
        if state.best is not None and not {"folder", "step", "metrics"} <= state.best.keys():
            raise ValueError(f"its best checkpoint is {state.best!r}")
        return state

    def check_reachable(self, steps_per_epoch: int, total_steps: int) -> None:
        """Refuses a position that a run of these lengths cannot have reached."""
        if self.step > total_steps:
            raise ValueError(f"it is at step {self.step}, and the run ends after step {total_steps}")
        if self.step != self.epoch * steps_per_epoch + self.in_epoch:
            raise ValueError(
                f"step {self.step} is not step {self.in_epoch} of epoch {self.epoch + 1} with {steps_per_epoch} steps per epoch"
            )


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        reason: "finished", "early stop" or "interrupted".
        step: optimizer steps taken, over all resumptions.
        epoch: epochs begun.
        metrics: the last evaluation of each evaluator.
        best: the content of best.json, None where nothing was selected.
        folder: of the last checkpoint, None for a run without any.
        seconds: duration of this call.
    """

    reason: str
    step: int
    epoch: int
    metrics: Mapping[str, Mapping[str, float]]
    best: Mapping[str, Any] | None
    folder: Path | None
    seconds: float


def run_identity(step: TrainStep, steps_per_epoch: int, select: str | None) -> dict[str, Any]:
    """What `fit` can tell a run by, besides its settings."""
    shapes = [f"{name} {tuple(p.shape)}" for name, p in unwrap_model(step.model).named_parameters()]
    return {
        "steps_per_epoch": steps_per_epoch,
        "parameters": f"{len(shapes)} tensors, {derive(0, *shapes):016x}",
        "groups": [
            {key: value for key, value in group.items() if key in ("initial_lr", "weight_decay")}
            | {"tensors": len(group["params"])}
            for group in step.optimizer.param_groups
        ],
        "loss": type(unwrap_loss(step.loss)).__name__,
        "select": select,
    }


def find_checkpoint(store: CheckpointStore, processes: Processes, *, resume: bool) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to continue from, if any, and what is wrong with newer ones; a collective call."""
    if resume:
        return processes.on_first(store.newest_good)
    if store.pointer("last") is not None:
        raise ValueError(
            f"fit: {store.path.parent} already holds a run ({store.describe_last()}): resume it, or choose another folder"
        )
    return None, []


def restore(
    checkpoint: Checkpoint,
    step: TrainStep,
    identity: Mapping[str, Any],
    *,
    steps_per_epoch: int,
    defaults: Mapping[str, Any],
) -> LoopState:
    """Loads a checkpoint into `step` and its model, after checking that it belongs to this run.

    Args:
        checkpoint: to continue from.
        step: gets its state.
        identity: what the checkpoint must agree with.
        steps_per_epoch: of this run.
        defaults: values of names that an identity does not have, in the checkpoint or here.

    Raises:
        ValueError: it does not, or its state cannot be used.
    """
    state, changes_with_length = checkpoint.state(), step.changes_with_length()
    with _explain(checkpoint):
        names = {"epochs", "steps", "warmup_steps", "warmup_epochs"} & state["settings"].keys()
        before = replace(step.settings, **{name: state["settings"][name] for name in names})
        warmups = (settings.total_warmup_steps(steps_per_epoch) for settings in (before, step.settings))
        changes_with_length = changes_with_length or len(set(warmups)) > 1  # that of a shorter run may have been cut
        differences = step.settings.differences(state["settings"], changes_with_length=changes_with_length)
        # parameter groups follow from settings, which say more
        implied = {"groups"} if differences else set()
        saved, now = ({k: v for k, v in found.items() if k not in implied} for found in (state["identity"], identity))
        differences += _differences(saved, now, defaults)
    if differences:
        longer = any(phrase.startswith(("epochs ", "steps ")) for phrase in differences)
        advice = "; to train it for longer, start a new run from its weights (--weights RUN)" if longer else ""
        raise ValueError(
            f"fit: {checkpoint.folder.parents[1]} was started differently ({'; '.join(differences)}): resume with the settings "
            f"it was started with, or choose another folder{advice}"
        )
    with _explain(checkpoint):
        position = LoopState.from_dict(state["position"])
        position.check_reachable(steps_per_epoch, step.settings.total_steps(steps_per_epoch))
        if position.step != checkpoint.step:
            raise ValueError(f"it is of step {position.step}")
    # before the train step, which passes the weights on to processes that shard them
    checkpoint.load_into(step.model)
    with _explain(checkpoint):
        step.restore(state, with_chunk_size=step.settings.chunk_size == state["settings"]["chunk_size"])
    return position


def is_of_another_run(checkpoint: Checkpoint, identity: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether `restore` will refuse the checkpoint, as far as a part of its identity tells."""
    with _explain(checkpoint):
        saved = {name: value for name, value in checkpoint.state()["identity"].items() if name in {**defaults, **identity}}
    return bool(_differences(saved, identity, defaults))


def _differences(saved: Mapping[str, Any], identity: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    saved, identity = {**defaults, **saved}, {**defaults, **identity}
    # a name that the saved run still does not have is a setting that its version did not have
    return [
        f"parameter groups were {_described(value)} and are {_described(identity[name])}"
        if name == "groups" and name in identity
        else f"{name} was {value!r} and is {identity.get(name)!r}"
        for name, value in sorted(saved.items())
        if value != identity.get(name)
    ]


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    """Parameter groups of an identity, as a sentence has them."""
    return ", ".join(
        f"{group['tensors']} tensor{'s' * (group['tensors'] != 1)} (lr {group['initial_lr']:g}, "
        f"weight decay {group.get('weight_decay', 0):g})"
        for group in groups
    )


@contextlib.contextmanager
def _explain(checkpoint: Checkpoint) -> Iterator[None]:
    """Explains errors of a state that could be read and still does not belong to a run that can be continued."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{checkpoint.folder} does not hold the state of a run that can be continued "
            f"({type(error).__name__}: {' '.join(str(error).split())}): delete it to continue from the one before"
        ) from error
