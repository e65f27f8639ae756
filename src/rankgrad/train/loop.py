"""The training loop: model, loss, batches and evaluators are handed in.

    outcome = fit(model, loss, batches, TrainSettings(epochs=55), RunFolder("runs/sop"), groups=groups, resume=True)

All randomness of step s in epoch e is a function of (seed, e, s), so that a run which was killed and resumed ends with the
weights of one that never was.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.data.seeds import derive
from rankgrad.train.checkpoints import Checkpoint, RunFolder, folder_of, unwrapped
from rankgrad.train.diagnostics import diagnose
from rankgrad.train.errors import LostProcessError, TrainingError
from rankgrad.train.interruption import Interruption
from rankgrad.train.journal import Journal, jsonable, open_journal, provenance
from rankgrad.train.meters import Mean, Pace
from rankgrad.train.processes import ALONE, Processes, is_lost
from rankgrad.train.progress import Progress
from rankgrad.train.protocols import Batches, Evaluator, Loss, undivided
from rankgrad.train.settings import TrainSettings
from rankgrad.train.train_step import OutOfMemoryError, Stepper, Taken
from rankgrad.train.watch import NotFiniteError

# seconds in which a second signal is the first once more: a terminal and torchrun each send one to every process
SAME_WISH = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        reason: "finished", "early stop" or "interrupted".
        step: optimizer steps done, over all resumptions.
        epoch: epochs begun.
        metrics: the last evaluation of each evaluator.
        best: the content of best.json, None where nothing was selected.
        folder: of the last checkpoint.
        seconds: of this call.
    """

    reason: str
    step: int
    epoch: int
    metrics: Mapping[str, Mapping[str, float]]
    best: Mapping[str, Any] | None
    folder: Path
    seconds: float


def fit(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    settings: TrainSettings,
    run: RunFolder,
    *,
    groups: Sequence[dict[str, Any]] | None = None,
    evaluators: Mapping[str, Evaluator] | None = None,
    select: str | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    description: Mapping[str, Any] | None = None,
    processes: Processes = ALONE,
) -> Outcome:
    """Trains `model` and keeps its journal and checkpoints in `run`.

    With several processes all of them call this, each with its share of every batch (`Shared`), a `DistributedRankLoss` and the
    same for all else; loss, gradients and metrics are then those of one process. Random layers are the exception: each process
    draws its own. The first process writes, into a folder that all can read. Any number of processes can resume the run.

    Args:
        model: from images to embeddings.
        loss: from embeddings and labels to one value; if it is a module its state is part of a checkpoint.
        batches: one batch is one optimizer step, however many chunks it takes.
        settings: everything else that decides the run.
        run: where to write.
        groups: parameter groups with their own `lr` and `weight_decay`; by default all parameters of model and loss.
        evaluators: by name of the split, functions from the model (in evaluation mode) to metrics; called by all processes,
            and what they give on the first counts.
        select: which of them chooses the best checkpoint and stops early. Anything but validation classes is noted as such.
        device: where to train.
        resume: continue from the last checkpoint; without one, begin.
        identity: what else a resumed run must agree with, such as the recipe's fields.
        description: what else the journal's first entry says, such as counts of data.
        processes: those that train together, from `rankgrad.train.processes.joined`.
    """
    evaluators = evaluators or {}
    if select is not None and select not in evaluators:
        raise ValueError(f"fit: select must be one of the evaluators {sorted(evaluators)}, got {select!r}")
    if settings.patience and select is None:
        raise ValueError("fit: patience needs select, the evaluator whose metric is waited for")
    if not len(batches):
        raise ValueError("fit: batches must hold at least one batch, got none")
    device = torch.device(device)
    run.keep_last = settings.keep_last
    processes.from_first(run.prepare)
    with contextlib.ExitStack() as stack:
        # every step seeds torch's generators; the caller gets his own back
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        training = _Training(
            model, loss, batches, settings, run, groups, dict(evaluators), select, device, dict(identity or {}), processes
        )
        return training.run_to_end(stack, resume, dict(description or {}))


@dataclass
class _Position:
    """Where a run stands."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    best: dict[str, Any] | None = None
    stale: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "_Position":
        """As a checkpoint has it."""
        found = cls(**saved)
        counts = (found.step, found.epoch, found.in_epoch, found.stale)
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(found.metrics, dict):
            raise ValueError(f"its position is {saved!r}")
        if found.best is not None and not {"folder", "step", "metrics"} <= found.best.keys():
            raise ValueError(f"its best checkpoint is {found.best!r}")
        return found


@contextlib.contextmanager
def _understood(checkpoint: Checkpoint) -> Iterator[None]:
    """Around the use of a state that was read whole and may still not be that of a run."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{checkpoint.folder} does not hold the state of a run that can be continued "
            f"({type(error).__name__}: {' '.join(str(error).split())}): delete it to go on from the one before"
        ) from error


class _Training:
    """One run. The parts are made in the constructor, `run_to_end` goes through the epochs."""

    journal: Journal
    progress: Progress

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        settings: TrainSettings,
        run: RunFolder,
        groups: Sequence[dict[str, Any]] | None,
        evaluators: dict[str, Evaluator],
        select: str | None,
        device: torch.device,
        identity: dict[str, Any],
        processes: Processes,
    ) -> None:
        self.processes = processes
        self.model, self.batches, self.settings, self.run = model, batches, settings, run
        self.evaluators, self.select, self.device = evaluators, select, device
        self.stepper = Stepper(
            model, loss, settings, groups, steps_per_epoch=len(batches), device=device, processes=processes
        )  # fmt: skip
        self.total = settings.total_steps(len(batches))
        self.identity = jsonable({**self._own_identity(), **identity})
        self.at = _Position()
        self.interruption = Interruption(grace=SAME_WISH if processes.size > 1 else 0.0)
        self.pace = Pace()
        self.epoch_loss = Mean()

    def run_to_end(self, stack: contextlib.ExitStack, resume: bool, description: dict[str, Any]) -> Outcome:
        start = time.perf_counter()
        checkpoint, faults = self._origin(resume)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.journal = Journal([])
        self.processes.from_first(self._open_journal)
        stack.callback(self.journal.close)
        stack.callback(self.stepper.release)
        shown = self.processes.first
        self.progress = stack.enter_context(Progress(self.total, "training", unit="steps", done=self.at.step, shown=shown))
        self._note_start(resume, checkpoint, faults, description)
        stack.enter_context(self.interruption)
        try:
            reason = self._epochs()
        except LostProcessError as error:
            raise self._ended(self._deserted(error)) from error
        except (NotFiniteError, OutOfMemoryError) as error:
            said = self._of_all(error) if isinstance(error, NotFiniteError) else error
            raise self._ended(TrainingError(f"{said}. The run stops; {self.run.last_good()}.")) from error
        except (TrainingError, ValueError) as error:
            raise self._ended(error) from error.__cause__
        except RuntimeError as error:
            if self.processes.size == 1 or not is_lost(error):
                raise
            raise self._ended(self._deserted(error)) from error
        self.stepper.fetch()
        self._note("end", reason=reason, seconds=time.perf_counter() - start, best=self.at.best)
        if reason == "interrupted":
            asked = self.interruption.signal or "another process"
            self.progress.say(
                f"stopped by {asked} after step {self.at.step} of {self.total}; the checkpoint is written. {self.run.way_on()}"
            )
        return Outcome(
            reason=reason,
            step=self.at.step,
            epoch=self._epoch_number,
            metrics=self.at.metrics,
            best=self.at.best,
            folder=self.run.checkpoints / folder_of(self.at.step),
            seconds=time.perf_counter() - start,
        )

    def _epochs(self) -> str:
        while self.at.step < self.total and not self._waited_enough:
            self.batches.set_epoch(self.at.epoch)
            self.stepper.train()
            self.epoch_loss.reset()
            self.pace.reset()
            began, started_at = time.perf_counter(), self.at.step
            for position, indices, images, labels in self.batches.iterate(self.at.in_epoch):
                self._train_step(position, indices, images, labels)
                ends = position + 1 == len(self.batches) or self.at.step == self.total
                if ends:
                    break
                if self._asked_to_stop():
                    self._save()
                    return "interrupted"
                if self.settings.checkpoint_every and self.at.step % self.settings.checkpoint_every == 0:
                    self._save()
            if self.at.step == started_at:
                raise ValueError(
                    f"fit: batches promised {len(self.batches)} steps per epoch and gave none from {self.at.in_epoch}"
                )
            self._finish_epoch(time.perf_counter() - began, self.at.step - started_at)
            if self.at.step < self.total and self._asked_to_stop():
                return "interrupted"
        return "early stop" if self._waited_enough and self.at.step < self.total else "finished"

    def _finish_epoch(self, seconds: float, steps: int) -> None:
        complete = self.at.in_epoch >= len(self.batches)
        self.stepper.settle()
        self._note("epoch", loss=self.epoch_loss.value(), seconds=seconds, steps=steps)
        every = self.settings.evaluate_every
        final = self.at.step == self.total
        is_best = False
        if self.evaluators and (final or (complete and every and (self.at.epoch + 1) % every == 0)):
            is_best = self._evaluate()
        number = self._epoch_number
        if complete:
            self.at.epoch, self.at.in_epoch = self.at.epoch + 1, 0
        every = self.settings.checkpoint_every
        due = self.at.step % every == 0 if every else complete
        if due or is_best or final or self._waited_enough or self._asked_to_stop():
            self._save(number)

    def _asked_to_stop(self) -> bool:
        """Whether any process was; all of them must ask."""
        return self.processes.any(self.interruption.signal is not None)

    def _train_step(self, position: int, indices: Tensor, images: Any, labels: Tensor) -> None:
        # random layers of the other processes see other images and draw anew
        own = () if self.processes.first else ("process", self.processes.rank)
        seed = derive(self.settings.seed, "step", self.at.epoch, position, *own)
        taken = self.stepper.take(self.at.step, seed, indices, images, labels, warn=self._warn)
        self.at.step, self.at.in_epoch = self.at.step + 1, position + 1
        self.epoch_loss.add(taken.loss)
        self.pace.add(len(taken.labels))
        note = ""
        if self.at.step % self.settings.log_every == 0 or self.at.step in (1, self.total):
            note = self._log(taken)
        self.progress.advance(note=note)

    def _log(self, taken: Taken) -> str:
        self.stepper.settle()  # what follows waits for the device anyway, and cannot make sense of NaN
        rate = self.pace.rate(self.device)
        content: dict[str, Any] = {
            "loss": float(taken.loss),
            "lr": taken.lr,
            "images_per_second": rate,
            "gradient": float(taken.gradient),
            "chunk_size": taken.chunk_size,
            **(diagnose(taken.embeddings, taken.labels, undivided(self.stepper.loss)) if self.processes.first else {}),
        }
        if self.device.type == "cuda":
            content["memory"] = torch.cuda.max_memory_allocated(self.device)
        scale = self.stepper.scale()
        if scale is not None:
            content["scale"] = scale
        self._note("step", **content)
        self.pace.reset()
        return f"epoch {self._epoch_number}, loss {content['loss']:.4f}, {rate:,.0f} images/s"

    def _evaluate(self) -> bool:
        """Runs all evaluators; True if the metric that selects is the best so far."""
        is_best = False
        self.stepper.fetch()
        self.model.eval()
        for split, evaluator in self.evaluators.items():
            began = time.perf_counter()
            with torch.no_grad():
                found = {name: float(value) for name, value in evaluator(self.model).items()}
            metrics = self.processes.from_first(lambda found=found: found)  # type: ignore[misc]
            self.at.metrics[split] = metrics
            self._note("eval", split=split, metrics=metrics, seconds=time.perf_counter() - began)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in list(metrics.items())[:4])
            if split == self.select:
                is_best = self._judge(metrics)
            self.progress.say(
                f"epoch {self._epoch_number}, {split}: {shown}" + (" (best)" if is_best and split == self.select else "")
            )
        self.stepper.train()
        return is_best

    def _judge(self, metrics: Mapping[str, float]) -> bool:
        name = self.settings.metric
        if name not in metrics:
            raise ValueError(f"fit: metric must be one of {sorted(metrics)}, which {self.select!r} evaluates, got {name!r}")
        so_far = -math.inf if self.at.best is None else self.at.best["metrics"][name]
        if not metrics[name] > so_far:
            self.at.stale += 1
            return False
        self.at.stale = 0
        self.at.best = {
            "folder": folder_of(self.at.step),
            "step": self.at.step,
            "epoch": self._epoch_number,
            "metrics": dict(metrics),
            "metric": name,
            "selected_on": self.select,
        }
        return True

    def _save(self, epoch: int | None = None) -> None:
        self.stepper.settle()
        began = time.perf_counter()
        number = self._epoch_number if epoch is None else epoch
        metrics = self.at.metrics.get(self.select or "", {})
        state = {
            "format": 1,
            "position": dict(vars(self.at)),
            **self.stepper.state(),
            "settings": self.settings.as_dict(),
            "identity": self.identity,
        }
        weights, step, best = self.stepper.weights(), self.at.step, self.at.best
        saved = self.processes.from_first(
            lambda: self.run.save(weights, state, step=step, epoch=number, metrics=metrics, best=best)
        )
        self._note("checkpoint", folder=saved.folder.name, seconds=time.perf_counter() - began)
        self.pace.reset()

    def _origin(self, resume: bool) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint to continue from, if any, and what is wrong with newer ones."""
        if resume:
            return self.processes.from_first(self.run.newest_good)
        if self.run.pointer("last") is not None:
            raise ValueError(
                f"fit: {self.run.path} already holds a run ({self.run.last_good()}): resume it or choose another folder"
            )
        return None, []

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state()
        with _understood(checkpoint):
            differences = self._differences(state)
        if differences:
            raise ValueError(
                f"fit: {self.run.path} was started differently ({'; '.join(differences)}): resume with what it was started "
                "with, or choose another folder"
            )
        # before the stepper, which hands the weights on to processes that divide them
        checkpoint.load_into(self.model)
        with _understood(checkpoint):
            self.stepper.restore(state, with_chunk_size=self.settings.chunk_size == state["settings"]["chunk_size"])
            self.at = _Position.of(state["position"])
        self.processes.from_first(lambda: self.run.continue_from(checkpoint.step, self.at.best))

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        """What stands against continuing the run that `state` is of."""
        saved = state["identity"]
        return self.settings.differences(state["settings"]) + [
            f"{name} was {saved.get(name)!r} and is {self.identity.get(name)!r}"
            for name in sorted(self.identity.keys() | saved.keys())
            if saved.get(name) != self.identity.get(name)
        ]

    def _own_identity(self) -> dict[str, Any]:
        shapes = [f"{name} {tuple(p.shape)}" for name, p in unwrapped(self.model).named_parameters()]
        return {
            "steps_per_epoch": len(self.batches),
            "parameters": f"{len(shapes)} tensors, {derive(0, *shapes):016x}",
            "groups": [
                {key: value for key, value in group.items() if key in ("initial_lr", "weight_decay")}
                | {"tensors": len(group["params"])}
                for group in self.stepper.optimizer.param_groups
            ],
            "loss": type(undivided(self.stepper.loss)).__name__,
            "select": self.select,
        }

    def _note_start(self, resume: bool, checkpoint: Checkpoint | None, faults: list[str], description: dict[str, Any]) -> None:
        kind = "start" if checkpoint is None else "resume"
        counts = {
            "steps_per_epoch": len(self.batches),
            "total_steps": self.total,
            "parameters": sum(p.numel() for p in self.stepper.parameters),
            "processes": self.processes.size,
        }
        self._note(
            kind, settings=self.settings.as_dict(), identity=self.identity, **provenance(self.device), **counts, **description
        )
        for fault in faults:
            self._warn(f"a damaged checkpoint was passed over: {fault}")
        if resume and checkpoint is None:
            self._warn("there is no checkpoint to resume from: the run begins anew")
        if self.select is not None and not self.select.startswith("validation"):
            self._warn(
                f"the best checkpoint is selected on {self.select!r} and not on validation classes: "
                "its number is the best of many on that split"
            )

    def _open_journal(self) -> None:
        self.journal = open_journal(self.run.journal, self.settings, resume_at=self.at.step)

    def _of_all(self, error: NotFiniteError) -> NotFiniteError:
        """With the images of all processes, which have all seen it: loss and gradient are the same everywhere."""
        if self.processes.size == 1 or not error.images:
            return error
        shares = self.processes.gather(error.images)
        return NotFiniteError(error.fact, ", ".join(f"{images} (rank {rank})" for rank, images in enumerate(shares)))

    def _deserted(self, error: Exception) -> LostProcessError:
        detail = " ".join(str(error).split())[:120]
        return LostProcessError(
            f"another process of the run has ended, so rank {self.processes.rank} stops at step {self.at.step + 1}; "
            f"{self.run.last_good()}. {self.run.way_on()} ({detail})"
        )

    def _warn(self, message: str, **content: Any) -> None:
        self._note("warning", message=message, **content)
        self.progress.say(f"warning: {message}")

    def _ended(self, error: Exception) -> Exception:
        with contextlib.suppress(TrainingError):  # the journal's disk may be the trouble
            self._note("end", reason="error", message=str(error))
        return error

    def _note(self, kind: str, **content: Any) -> None:
        self.journal.note(kind, step=self.at.step, epoch=self._epoch_number, **content)

    @property
    def _epoch_number(self) -> int:
        """Counted from 1; a finished epoch counts until the next one begins."""
        return self.at.epoch + 1 if self.at.in_epoch or not self.at.epoch else self.at.epoch

    @property
    def _waited_enough(self) -> bool:
        return bool(self.settings.patience) and self.at.stale >= self.settings.patience
