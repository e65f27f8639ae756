"""The training loop: `fit` takes a model, a loss, batches and evaluators.

    result = rg.fit(model, rg.RecallAtKLoss(), loader, rg.TrainSettings(epochs=55), "runs/mine", resume=True)

All randomness of step s in epoch e is a function of (seed, e, s), so a run that was killed and resumed ends with the weights of
one that never was.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankgrad._messages import Progress
from rankgrad.data.seeds import derive
from rankgrad.train.checkpoints import Checkpoint, CheckpointStore, folder_name
from rankgrad.train.errors import (
    LostProcessError,
    NotFiniteError,
    OutOfMemoryError,
    TrainingError,
    describe_killed_worker,
    is_killed_worker,
)
from rankgrad.train.journal import JOURNAL, Journal, JsonLines, Tracker, jsonable, provenance
from rankgrad.train.large_batch import Loss
from rankgrad.train.loader_batches import as_batches
from rankgrad.train.meters import RecentRate, RunningMean
from rankgrad.train.processes import ALONE, Processes, StopSignal, is_lost_process
from rankgrad.train.resume import TRAIN_FURTHER, FitResult, LoopState, find_checkpoint, restore, run_identity
from rankgrad.train.settings import TrainSettings
from rankgrad.train.step_log import StepLog
from rankgrad.train.train_step import TrainStep

# with several processes, ignore repeated signals for this many seconds: a terminal and torchrun each send one to every process
SIGNAL_GRACE = 5.0

# a checkpoint after an epoch that costs more seconds than this waits until that many times its cost have passed
CHEAP_CHECKPOINT, CHECKPOINT_INTERVAL = 0.5, 10

Evaluator: TypeAlias = Callable[[nn.Module], Mapping[str, float]]


class Batches(Protocol):
    """The batches of an epoch, from any position: (step in the epoch, indices, images, labels)."""

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int: ...

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]: ...


def fit(
    model: nn.Module,
    loss: Loss,
    batches: "Batches | DataLoader[Any]",
    settings: TrainSettings,
    folder: Path | str,
    *,
    param_groups: Sequence[dict[str, Any]] | None = None,
    evaluators: Mapping[str, Evaluator] | None = None,
    select: str | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    identity_defaults: Mapping[str, Any] | None = None,
    description: Mapping[str, Any] | None = None,
    trackers: Sequence[Tracker] = (),
    resume_hint: str = "Continue with fit(..., resume=True).",
    processes: Processes = ALONE,
    checkpoints: bool = True,
) -> FitResult:
    """Trains `model` and keeps journal and checkpoints in `folder`.

    With several processes all of them call this, each with its shard of every batch (`ShardedBatches`; a `DataLoader` is
    sharded here), a `DistributedRankLoss` and otherwise the same arguments; loss, gradients and metrics are then those of one
    process. Random layers are the exception: each process draws its own. The first process writes, to a folder that all can
    read. Any number of processes can resume the run.

    Args:
        model: maps images to embeddings.
        loss: maps embeddings and labels to one value; the state of a module is part of a checkpoint.
        batches: a `DataLoader` that yields (images, labels), or anything with the methods of `Batches`. One batch is one
            optimizer step, whatever the number of chunks.
        settings: optimizer, schedule, precision and so on.
        folder: where to write.
        param_groups: parameter groups with their own `lr` and `weight_decay`; by default all parameters of model and loss.
        evaluators: by name of the split, functions from the model (in evaluation mode) to metrics; called on all processes,
            the answer of the first counts.
        select: the evaluator that chooses the best checkpoint and stops early. A warning says so unless it is validation.
        device: where to train.
        resume: continue from the last checkpoint, if there is one.
        identity: what else a resumed run must agree with, such as the settings of a recipe.
        identity_defaults: values of names that an `identity` leaves out, such as settings that earlier versions did not have.
        description: what else the first journal entry says, such as the size of the data.
        trackers: get every journal entry, on the first process.
        resume_hint: printed when the run is stopped.
        processes: those that train together, from `rankgrad.train.processes.join`.
        checkpoints: False writes none: the trained model is in memory, and the run cannot be resumed.
    """
    evaluators = evaluators or {}
    if resume and not checkpoints:
        raise ValueError("fit: a run without checkpoints cannot be resumed: use resume=False or checkpoints=True")
    if select is not None and select not in evaluators:
        raise ValueError(f"fit: select must be one of the evaluators {sorted(evaluators)}, got {select!r}")
    if settings.patience and select is None:
        raise ValueError("fit: patience needs select, the evaluator whose metric has to improve")
    batches = as_batches(batches, settings.seed, processes)
    if not len(batches):
        raise ValueError("fit: batches must hold at least one batch, got none")
    device, store = torch.device(device), CheckpointStore(Path(folder) / "checkpoints", keep_last=settings.keep_last)
    processes.on_first(store.prepare)
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            # kernels, graphs and events belong to the current GPU, whatever their tensors are on
            stack.enter_context(torch.cuda.device(device))
        # every step seeds torch's generators; restore the caller's
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        step = TrainStep(
            model,
            loss,
            settings,
            param_groups,
            steps_per_epoch=len(batches),
            device=device,
            processes=processes,
            item_names=getattr(batches, "item_names", None),
        )
        stack.callback(step.release)
        training = _Training(
            step,
            batches,
            store,
            dict(evaluators),
            select,
            dict(identity or {}),
            dict(identity_defaults or {}),
            trackers,
            resume_hint,
            saves=checkpoints,
        )
        return training.run(stack, resume, dict(description or {}))


class _Training:
    """One call of `fit`."""

    progress: Progress
    step_log: StepLog

    def __init__(
        self,
        step: TrainStep,
        batches: Batches,
        store: CheckpointStore,
        evaluators: dict[str, Evaluator],
        select: str | None,
        identity: dict[str, Any],
        identity_defaults: dict[str, Any],
        trackers: Sequence[Tracker],
        resume_hint: str,
        *,
        saves: bool,
    ) -> None:
        self.step, self.batches, self.store, self.saves = step, batches, store, saves
        self.noun: str = getattr(batches, "noun", "image")
        self.model, self.settings, self.device, self.processes = step.model, step.settings, step.device, step.processes
        self.evaluators, self.select, self.trackers, self.resume_hint = evaluators, select, trackers, resume_hint
        self.total = self.settings.total_steps(len(batches))
        self.identity = jsonable({**run_identity(step, len(batches), select), **identity})
        self.identity_defaults = jsonable(identity_defaults)
        self.state = LoopState()
        self.journal = Journal([])
        self.stop_signal = StopSignal(grace=SIGNAL_GRACE if self.processes.size > 1 else 0.0)
        self.recent_rate, self.epoch_loss = RecentRate(), RunningMean()
        self._saved_at, self._save_seconds = 0.0, 0.0

    def run(self, stack: contextlib.ExitStack, resume: bool, description: dict[str, Any]) -> FitResult:
        start = time.perf_counter()
        checkpoint, faults = find_checkpoint(self.store, self.processes, resume=resume)
        self._resumed = checkpoint is not None
        if checkpoint is not None:
            self.state = restore(
                checkpoint, self.step, self.identity, steps_per_epoch=len(self.batches), defaults=self.identity_defaults
            )
            self.processes.on_first(lambda: self.store.rewind_to(checkpoint.step, self.state.best))
        self.processes.on_first(self._open_journal)
        stack.callback(self.journal.close)
        self.progress = stack.enter_context(
            Progress(self.total, "training", unit="steps", done=self.state.step, shown=self.processes.first)
        )
        self.step_log = StepLog(self.step, self.journal.log, self.progress.say)
        stack.callback(self.step_log.close)
        self._log_start(resume, checkpoint, faults, description)
        stack.enter_context(self.stop_signal)
        try:
            reason = self._train()
        except LostProcessError as error:
            raise self._log_error(self._lost_process(error)) from error
        except (NotFiniteError, OutOfMemoryError) as error:
            fact = self._of_all_processes(error) if isinstance(error, NotFiniteError) else error
            raise self._log_error(TrainingError(f"{fact}. The run stops; {self.store.describe_last()}.")) from error
        except (TrainingError, ValueError) as error:
            raise self._log_error(error) from error.__cause__
        except RuntimeError as error:
            if is_killed_worker(error):
                told = f"{describe_killed_worker(error)}. The run stops; {self.store.describe_last()}. {self.resume_hint}"
                raise self._log_error(TrainingError(told)) from error
            if self.processes.size == 1 or not is_lost_process(error):
                raise
            raise self._log_error(self._lost_process(error)) from error
        self.step.gather_weights()
        self._log("end", reason=reason, seconds=time.perf_counter() - start, best=self.state.best)
        if reason == "interrupted":
            kept = f"the checkpoint is written. {self.resume_hint}" if self.saves else "the run keeps no checkpoints"
            by = self.stop_signal.name or "another process"
            self.progress.say(f"stopped by {by} after step {self.state.step} of {self.total}; {kept}")
        return FitResult(
            reason=reason,
            step=self.state.step,
            epoch=self.state.epoch_number,
            metrics=self.state.metrics,
            best=self.state.best,
            folder=self.store.path / folder_name(self.state.step) if self.saves else None,
            seconds=time.perf_counter() - start,
        )

    def _train(self) -> str:
        """Trains to the end; returns the reason of the end."""
        if not self.total and not self._resumed:
            self._evaluate()
            self._save()
        while self.state.step < self.total and not self._out_of_patience:
            self.batches.set_epoch(self.state.epoch)
            self.step.train()
            self.epoch_loss.reset()
            self.step_log.throughput.reset()
            self.recent_rate.reset()
            began, first_step = time.perf_counter(), self.state.step
            for position, indices, images, labels in self.batches.iterate(self.state.in_epoch):
                self._train_step(position, indices, images, labels)
                if position + 1 == len(self.batches) or self.state.step == self.total:
                    break
                if self._stop_requested():
                    self._save()
                    return "interrupted"
                if self.settings.checkpoint_every and self.state.step % self.settings.checkpoint_every == 0:
                    self._save()
            if self.state.step == first_step:
                raise ValueError(
                    f"fit: batches promised {len(self.batches)} steps per epoch and gave none from step {self.state.in_epoch}"
                )
            self.step.flush()  # the epoch ends when its last step does
            self._finish_epoch(time.perf_counter() - began, self.state.step - first_step)
            if self.state.step < self.total and self._stop_requested():
                return "interrupted"
        return "early stop" if self._out_of_patience and self.state.step < self.total else "finished"

    def _finish_epoch(self, seconds: float, steps: int) -> None:
        self.step_log.finish()
        complete = self.state.in_epoch >= len(self.batches)
        self._log("epoch", loss=self.epoch_loss.value(), seconds=seconds, steps=steps)
        every = self.settings.evaluate_every
        final = self.state.step == self.total
        is_best = False
        if self.evaluators and (final or (complete and every and (self.state.epoch + 1) % every == 0)):
            is_best = self._evaluate()
        number = self.state.epoch_number
        if complete:
            self.state.epoch, self.state.in_epoch = self.state.epoch + 1, 0
        every = self.settings.checkpoint_every
        due = self.state.step % every == 0 if every else complete and self._checkpoint_is_worthwhile()
        if due or is_best or final or self._out_of_patience or self._stop_requested():
            self._save(number)

    def _checkpoint_is_worthwhile(self) -> bool:
        """Whether a checkpoint now takes at most a tenth of the time since the last one; a collective call."""
        since = time.perf_counter() - self._saved_at
        return self.processes.on_first(
            lambda: self._save_seconds < CHEAP_CHECKPOINT or since >= CHECKPOINT_INTERVAL * self._save_seconds
        )

    def _stop_requested(self) -> bool:
        """Whether any process got a signal; a collective call."""
        return self.processes.all_any(self.stop_signal.name is not None)

    def _train_step(self, position: int, indices: Tensor, images: Any, labels: Tensor) -> None:
        # random layers of the other processes see other images and draw their own numbers
        own = () if self.processes.first else ("process", self.processes.rank)
        seed = derive(self.settings.seed, "step", self.state.epoch, position, *own)
        output = self.step(self.state.step, seed, indices, images, labels, warn=self._warn)
        self.state.step, self.state.in_epoch = self.state.step + 1, position + 1
        self.epoch_loss.add(output.loss)
        self.step_log.throughput.add(len(output.labels))
        if self.state.step % self.settings.log_every == 0 or self.state.step in (1, self.total):
            self.step_log.add(self.state.step, self.state.epoch_number, output)
        else:
            self.step_log.write_arrived()
        # on a GPU the loss is that of the step before, which has arrived: reading this one would synchronise
        rate, checked = self.recent_rate.add(len(output.labels)), self.step.guard.checked
        shown = "" if checked is None else f"loss {checked.loss:.4f}, "
        self.progress.advance(note=f"epoch {self.state.epoch_number}, {shown}{rate:,.0f} {self.noun}s/s")

    def _evaluate(self) -> bool:
        """Runs all evaluators; True if the selecting metric is the best so far."""
        is_best = False
        self.step.gather_weights()
        self.model.eval()
        for split, evaluator in self.evaluators.items():
            began = time.perf_counter()
            with torch.no_grad():
                found = {name: float(value) for name, value in evaluator(self.model).items()}
            metrics = self.processes.on_first(lambda found=found: found)  # type: ignore[misc]
            self.state.metrics[split] = metrics
            self._log("eval", split=split, metrics=metrics, seconds=time.perf_counter() - began)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in list(metrics.items())[:4])
            if split == self.select:
                is_best = self.state.update_best(metrics, self.settings.metric, selected_on=split)
            best = " (best)" if is_best and split == self.select else ""
            self.progress.say(f"epoch {self.state.epoch_number}, {split}: {shown}{best}")
        self.step.train()
        return is_best

    def _save(self, epoch: int | None = None) -> None:
        self.step.flush()
        self.step_log.finish()
        if not self.saves:
            return
        began = time.perf_counter()
        number = self.state.epoch_number if epoch is None else epoch
        metrics = self.state.metrics.get(self.select or "", {})
        state = {
            "position": self.state.as_dict(),
            **self.step.state(),
            "settings": self.settings.as_dict(),
            "identity": self.identity,
        }
        weights, step, best = self.step.weights(), self.state.step, self.state.best
        saved = self.processes.on_first(
            lambda: self.store.save(weights, state, step=step, epoch=number, metrics=metrics, best=best)
        )
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - began
        self._log("checkpoint", folder=saved.folder.name, seconds=self._save_seconds)
        self.step_log.throughput.reset()
        self.recent_rate.reset()

    def _log_start(self, resume: bool, checkpoint: Checkpoint | None, faults: list[str], description: dict[str, Any]) -> None:
        kind = "start" if checkpoint is None else "resume"
        counts = {
            "steps_per_epoch": len(self.batches),
            "total_steps": self.total,
            "parameters": sum(p.numel() for p in self.step.parameters),
            "processes": self.processes.size,
        }
        self._log(
            kind, settings=self.settings.as_dict(), identity=self.identity, **provenance(self.device), **counts, **description
        )
        for fault in faults:
            self._warn(f"skipped a damaged checkpoint: {fault}")
        if self._resumed and self.state.step == self.total:
            self.progress.say(f"the run is finished after step {self.total}. {TRAIN_FURTHER}")
        if resume and checkpoint is None:
            self._warn("there is no checkpoint to resume from: the run starts from the beginning")
        if self.select is not None and not self.select.startswith("validation"):
            self._warn(
                f"the best checkpoint is selected on {self.select!r} and not on validation classes: "
                "its number is the best of many on that split"
            )

    def _open_journal(self) -> None:
        path = self.store.path.parent / JOURNAL
        self.journal = Journal([JsonLines(path, resume_at=self.state.step), *self.trackers])

    def _of_all_processes(self, error: NotFiniteError) -> NotFiniteError:
        """With the images of all processes: loss and gradient are the same everywhere, so all of them raise."""
        if self.processes.size == 1 or not error.images:
            return error
        shards = self.processes.gather(error.images)
        return NotFiniteError(error.fact, ", ".join(f"{images} (rank {rank})" for rank, images in enumerate(shards)))

    def _lost_process(self, error: Exception) -> LostProcessError:
        detail = " ".join(str(error).split())[:120]
        return LostProcessError(
            f"another process of the run has ended, so rank {self.processes.rank} stops at step {self.state.step + 1}; "
            f"{self.store.describe_last()}. {self.resume_hint} ({detail})"
        )

    def _warn(self, message: str, **content: Any) -> None:
        self._log("warning", message=message, **content)
        self.progress.say(f"warning: {message}")

    def _log_error(self, error: Exception) -> Exception:
        with contextlib.suppress(TrainingError):  # the journal's disk may be the problem
            self.step_log.abandon()
            self._log("end", reason="error", message=str(error))
        return error

    def _log(self, kind: str, **content: Any) -> None:
        self.journal.log(kind, step=self.state.step, epoch=self.state.epoch_number, **content)

    @property
    def _out_of_patience(self) -> bool:
        return bool(self.settings.patience) and self.state.evaluations_since_best >= self.settings.patience
