"""The folder of a run and its checkpoints, written so that a crash at any moment leaves the last good one.

    RUN/checkpoints/step-00000120/weights.safetensors     the model
                                  state.pt                all else; loads with weights_only=True
                                  manifest.json           sizes and digests of the two
    RUN/checkpoints/last.json, best.json                  {"folder": "step-00000120", "step": 120, "epoch": 3, "metrics": {...}}

A checkpoint is written under another name, made durable and then renamed; a pointer is replaced in one move, and only when it
is durable do older checkpoints go.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankgrad.train.errors import TrainingError, is_full, reason_of

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"
UNFINISHED = ".writing-"
Pointer = Literal["last", "best"]
_NAME = re.compile(r"step-[0-9]{8,12}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that exists and whose files are what was written."""

    folder: Path
    step: int

    def weights(self) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{self.folder / WEIGHTS} is not a whole safetensors file ({error})") from error

    def state(self) -> dict[str, Any]:
        try:
            state = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # a forged pickle fails with whatever its bytes happen to ask for
            first_line = str(error).partition("\n")[0]
            raise ValueError(f"{self.folder / STATE} is not the state of a run ({first_line})") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.folder / STATE} is not the state of a run: it holds a {type(state).__name__}")
        return state

    def load_into(self, model: nn.Module) -> None:
        """Puts the weights into `model`, which must have exactly these parameters and buffers."""
        target, weights = unwrapped(model), self.weights()
        extra = {name: value for name, value in target.state_dict().items() if not isinstance(value, Tensor)}
        try:
            target.load_state_dict({**extra, **weights})
        except RuntimeError as error:
            raise ValueError(f"{self.folder / WEIGHTS} does not fit this model: {' '.join(str(error).split())}") from error


class RunFolder:
    """Where a run writes: settings, journal, checkpoints, results.

    Args:
        path: the folder; made when the run starts.
        keep_last: checkpoints that stay besides the best.
        command: trains; a run that was stopped says how to go on with it.
    """

    def __init__(self, path: Path | str, *, keep_last: int = 2, command: str = "rankgrad train") -> None:
        self.path, self.keep_last, self.command = Path(path), keep_last, command

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    def prepare(self) -> None:
        """Makes the folder and sweeps away what an interrupted write left."""
        with self._explained("be made or written to"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in (*self.checkpoints.glob(f"{UNFINISHED}*"), *self.path.glob(f"{UNFINISHED}*")):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            probe = self.checkpoints / f"{UNFINISHED}probe"
            probe.touch()
            probe.unlink()

    def write_json(self, name: str, content: Any) -> None:
        """Replaces a JSON file of the run in one move."""
        with self._explained(f"take {name}"):
            _replace(self.path / name, _json(content))

    def save(
        self,
        model: nn.Module | Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        best: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Writes a checkpoint of a model or its weights, points `last` to it, `best` to what `best` names, drops old ones."""
        name = folder_of(step)
        pointer = {"folder": name, "step": step, "epoch": epoch, "metrics": dict(metrics)}
        with self._explained(f"take the checkpoint of step {step}"):
            self._write(name, {WEIGHTS: _weights(model), STATE: _state(state)})
            _replace(self.checkpoints / "last.json", _json(pointer))
            if best is not None:
                self._point_to_best(best)
            self._prune()
        return Checkpoint(self.checkpoints / name, step)

    def _point_to_best(self, best: Mapping[str, Any]) -> None:
        if self.pointer("best") != best:
            _replace(self.checkpoints / "best.json", _json(best))

    def continue_from(self, step: int, best: Mapping[str, Any] | None) -> None:
        """Brings the folder to the state in which the checkpoint of `step` had just been written.

        Newer checkpoints will be made again, and a kill may have come before `best` was named or older ones were gone.
        """
        with self._explained("be tidied"):
            if best is None:
                (self.checkpoints / "best.json").unlink(missing_ok=True)
            else:
                self._point_to_best(best)
            for folder in self._folders():
                if step_of(folder) > step:
                    _delete(folder)
            self._prune()

    def checkpoint(self, which: Pointer = "last") -> Checkpoint:
        """The checkpoint a pointer names."""
        pointer = self.pointer(which)
        if pointer is None:
            raise FileNotFoundError(f"{self.checkpoints / f'{which}.json'} is missing or unreadable: no {which} checkpoint")
        found = Checkpoint(self.checkpoints / pointer["folder"], int(pointer["step"]))
        fault = _fault(found.folder)
        if fault:
            raise ValueError(f"{found.folder} is damaged: {fault}")
        return found

    def pointer(self, which: Pointer) -> dict[str, Any] | None:
        """The content of last.json or best.json."""
        path = self.checkpoints / f"{which}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or type(content.get("step")) is not int:
            return None
        return content if content.get("folder") == folder_of(content["step"]) else None

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """What to resume from, and what is wrong with checkpoints that had to be passed over.

        The one that `last` names comes first, then the others from the newest on: one that was renamed but not yet named by
        `last` when the run was killed is made again.
        """
        folders = self._folders()[::-1]
        pointer = self.pointer("last")
        if pointer is not None:
            named = self.checkpoints / pointer["folder"]
            folders = [named, *(folder for folder in folders if folder < named)]
        faults: list[str] = []
        for folder in folders:
            fault = _fault(folder)
            if fault is None:
                return Checkpoint(folder, step_of(folder)), faults
            faults.append(f"{folder.name}: {fault}")
        if faults:
            raise TrainingError(
                f"{self.checkpoints} holds no checkpoint that can be read ({'; '.join(faults)}): start a new run"
            )
        return None, faults

    def way_on(self) -> str:
        """What to type to continue the run."""
        return f"Continue with: {self.command} --resume {self.path}"

    def last_good(self) -> str:
        """For messages: the newest checkpoint."""
        pointer = self.pointer("last")
        return (
            "no checkpoint was written yet"
            if pointer is None
            else f"the last checkpoint is {self.checkpoints / pointer['folder']}"
        )

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            for leftover in self.checkpoints.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            advice = "Make room there" if is_full(error) else "See to its permissions or choose another folder"
            raise TrainingError(
                f"{self.path} cannot {what}: {reason_of(error)}; {self.last_good()}. {advice}, then resume."
            ) from error

    def _write(self, name: str, files: Mapping[str, bytes]) -> None:
        unfinished, finished = self.checkpoints / f"{UNFINISHED}{name}", self.checkpoints / name
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        manifest = {file: {"bytes": len(content), "blake2b": _digest(content)} for file, content in files.items()}
        for file, content in {**files, MANIFEST: _json(manifest)}.items():
            _write_durably(unfinished / file, content)
        _make_durable(unfinished)
        if finished.exists():
            _delete(finished)
        unfinished.rename(finished)
        _make_durable(self.checkpoints)

    def _prune(self) -> None:
        best = self.pointer("best")
        spared = {best["folder"]} if best else set()
        for folder in self._folders()[: -self.keep_last]:
            if folder.name not in spared:
                _delete(folder)

    def _folders(self) -> list[Path]:
        """Of all checkpoints, oldest first; what else lies there is nobody's business."""
        return sorted(path for path in self.checkpoints.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def folder_of(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:08}"


def step_of(folder: Path) -> int:
    """The step in a folder's name."""
    return int(folder.name.removeprefix("step-"))


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _weights(model: nn.Module | Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    # safetensors has no notion of two names for one storage; each gets its own copy and loading ties them again
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in (unwrapped(model).state_dict() if isinstance(model, nn.Module) else model).items()
        if isinstance(value, Tensor)
    }
    return save(tensors, metadata={"format": "pt"})


def _state(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _fault(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if nothing is."""
    for file in (MANIFEST, WEIGHTS, STATE):
        # a pipe of that name would be waited for
        if not (folder / file).is_file():
            return f"{file} is missing"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for file in (WEIGHTS, STATE):
            size = (folder / file).stat().st_size
            if size != manifest[file]["bytes"]:
                return f"{file} has {size} bytes and not {manifest[file]['bytes']}"
            if _digest((folder / file).read_bytes()) != manifest[file]["blake2b"]:
                return f"{file} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({error})"
    return None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _delete(folder: Path) -> None:
    # renamed first, so that a half-deleted folder is not taken for a checkpoint
    shutil.rmtree(folder.rename(folder.with_name(f"{UNFINISHED}{folder.name}-deleted")))


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    _write_durably(unfinished, content)
    os.replace(unfinished, path)  # noqa: PTH105 (the one call whose atomicity matters, under the name POSIX gives it)
    _make_durable(path.parent)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _make_durable(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
