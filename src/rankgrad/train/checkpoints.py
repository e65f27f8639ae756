"""Checkpoints of a run, written so that a crash at any moment leaves the last good one.

    RUN/checkpoints/step-00000120/weights.safetensors     the model
                                  state.safetensors       everything else: tensors, and the rest as JSON in the header
                                  manifest.json           sizes and digests of the two
    RUN/checkpoints/last.json, best.json                  {"folder": "step-00000120", "step": 120, "epoch": 3, "metrics": {...}}

A checkpoint is written under another name, made durable and then renamed; a pointer is replaced in one move, and only when it
is durable are older checkpoints deleted. Nothing is pickled, so reading a checkpoint never runs code.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from rankgrad._files import is_disk_full, sync_folder, write_durably, write_error_reason
from rankgrad.train.errors import TrainingError
from rankgrad.train.sharding import unwrap_model
from rankgrad.train.state_file import read_pickled_state, read_state, state_bytes

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.safetensors", "manifest.json"
# the state in checkpoints of format 1, still read
PICKLED_STATE = "state.pt"
FORMAT = 2
UNFINISHED = ".writing-"
Pointer = Literal["last", "best"]
_NAME = re.compile(r"step-[0-9]{8,12}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files match its manifest.

    Attributes:
        folder: holds the files and the manifest.
        step: after which it was written.
        file: name of the weights.
    """

    folder: Path
    step: int
    file: str = WEIGHTS

    @property
    def path(self) -> Path:
        """The file of the weights."""
        return self.folder / self.file

    @property
    def fingerprint(self) -> str:
        """Digest of the weights: equal fingerprints, equal weights."""
        return str(json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))[self.file]["blake2b"])

    def weights(self) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.path)
        except SafetensorError as error:
            raise ValueError(f"{self.path} is not a complete safetensors file ({error})") from error

    def state(self) -> dict[str, Any]:
        """Everything but the weights.

        Raises:
            ValueError: the file is not the state of a run, or of a format that this version does not read.
        """
        path = self.folder / STATE
        if path.is_file():
            state, known = read_state(path), FORMAT
        else:
            path = self.folder / PICKLED_STATE
            state, known = read_pickled_state(path), 1
        if not isinstance(state, dict):
            raise ValueError(f"{path} is not the state of a run: it holds a {type(state).__name__}")
        if state.get("format", known) != known:
            raise ValueError(
                f"{path} has format {state['format']!r}, this version reads format {known}: resume with the version of "
                "rankgrad that wrote it"
            )
        return state

    def load_into(self, model: nn.Module) -> None:
        """Loads the weights into `model`, which must have exactly these parameters and buffers."""
        target, weights = unwrap_model(model), self.weights()
        extra = {name: value for name, value in target.state_dict().items() if not isinstance(value, Tensor)}
        try:
            target.load_state_dict({**extra, **weights})
        except RuntimeError as error:
            raise ValueError(f"{self.path} does not fit this model: {' '.join(str(error).split())}") from error


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        path: folder for the checkpoints; created by `prepare`.
        keep_last: number of checkpoints kept besides the best.
    """

    def __init__(self, path: Path | str, *, keep_last: int = 2) -> None:
        self.path, self.keep_last = Path(path), keep_last

    def prepare(self) -> None:
        """Creates the folder and removes what an interrupted write left."""
        with self._explain("cannot be created or written to"):
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            probe = self.path / f"{UNFINISHED}probe"
            probe.touch()
            probe.unlink()

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
        """Writes a checkpoint of a model or its weights, points `last` to it and `best` to `best`, deletes old ones."""
        name = folder_name(step)
        pointer = {"folder": name, "step": step, "epoch": epoch, "metrics": dict(metrics)}
        content = {WEIGHTS: _weights_bytes(model), STATE: state_bytes({**state, "format": FORMAT})}
        with self._explain(f"cannot take the checkpoint of step {step}"):
            self._write(name, content)
            _replace(self.path / "last.json", _json(pointer))
            if best is not None:
                self._point_to_best(best)
            self._prune()
        return Checkpoint(self.path / name, step)

    def rewind_to(self, step: int, best: Mapping[str, Any] | None) -> None:
        """Restores the folder to what it was when the checkpoint of `step` had just been written.

        Newer checkpoints will be written again, and a kill may have come before `best` was updated or old ones were deleted.
        """
        with self._explain("cannot be cleaned up"):
            if best is None:
                (self.path / "best.json").unlink(missing_ok=True)
            else:
                self._point_to_best(best)
            for folder in self._folders():
                if _step_in(folder) > step:
                    _delete(folder)
            self._prune()

    def checkpoint(self, which: Pointer = "last") -> Checkpoint:
        """The checkpoint that a pointer names."""
        pointer = self.pointer(which)
        if pointer is None:
            raise FileNotFoundError(f"{self.path / f'{which}.json'} is missing or unreadable: no {which} checkpoint")
        return checked(Checkpoint(self.path / pointer["folder"], int(pointer["step"])))

    def pointer(self, which: Pointer) -> dict[str, Any] | None:
        """The content of last.json or best.json, None if there is none that can be read."""
        path = self.path / f"{which}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or type(content.get("step")) is not int:
            return None
        return content if content.get("folder") == folder_name(content["step"]) else None

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint to resume from, and what is wrong with those that were skipped.

        The one that `last` names comes first, then older ones, newest first. One that was renamed but not yet named by `last`
        when the run was killed is written again.
        """
        folders = self._folders()[::-1]
        pointer = self.pointer("last")
        if pointer is not None:
            named = self.path / pointer["folder"]
            folders = [named, *(folder for folder in folders if folder < named)]
        faults: list[str] = []
        for folder in folders:
            fault = _fault(folder)
            if fault is None:
                return Checkpoint(folder, _step_in(folder)), faults
            faults.append(f"{folder.name}: {fault}")
        if faults:
            raise TrainingError(f"{self.path} holds no readable checkpoint ({'; '.join(faults)}): start a new run")
        return None, faults

    def describe_last(self) -> str:
        """For messages: which checkpoint is the newest."""
        pointer = self.pointer("last")
        return "no checkpoint was written yet" if pointer is None else f"the last checkpoint is {self.path / pointer['folder']}"

    @contextlib.contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            for leftover in self.path.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            advice = "Free some space" if is_disk_full(error) else "Check its permissions or choose another folder"
            raise TrainingError(
                f"{self.path} {what}: {write_error_reason(error)}; {self.describe_last()}. {advice}, then resume."
            ) from error

    def _point_to_best(self, best: Mapping[str, Any]) -> None:
        if self.pointer("best") != best:
            _replace(self.path / "best.json", _json(best))

    def _write(self, name: str, files: Mapping[str, bytes]) -> None:
        unfinished, finished = self.path / f"{UNFINISHED}{name}", self.path / name
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        manifest = {file: manifest_entry(content) for file, content in files.items()}
        for file, content in {**files, MANIFEST: _json(manifest)}.items():
            write_durably(unfinished / file, content)
        sync_folder(unfinished)
        if finished.exists():
            _delete(finished)
        unfinished.rename(finished)
        sync_folder(self.path)

    def _prune(self) -> None:
        best = self.pointer("best")
        spared = {best["folder"]} if best else set()
        for folder in self._folders()[: -self.keep_last]:
            if folder.name not in spared:
                _delete(folder)

    def _folders(self) -> list[Path]:
        """Folders of all checkpoints, oldest first; other files are ignored."""
        return sorted(path for path in self.path.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def checked(found: Checkpoint, *, has_state: bool = True) -> Checkpoint:
    """The checkpoint, whose files are there and are what was written; without `has_state` it has weights alone."""
    fault = _fault(found.folder) if has_state else _fault_of(found.folder, (found.file,))
    if fault:
        raise ValueError(f"{found.folder} is damaged: {fault}")
    return found


def manifest_entry(content: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": len(content), "blake2b": hashlib.blake2b(content, digest_size=16).hexdigest()}


def folder_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:08}"


def _step_in(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _weights_bytes(model: nn.Module | Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    # safetensors has no notion of two names for one storage; each gets its own copy and loading ties them again
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in (unwrap_model(model).state_dict() if isinstance(model, nn.Module) else model).items()
        if isinstance(value, Tensor)
    }
    return save(tensors, metadata={"format": "pt"})


def _fault(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if nothing is."""
    state = PICKLED_STATE if (folder / PICKLED_STATE).exists() and not (folder / STATE).exists() else STATE
    return _fault_of(folder, (WEIGHTS, state))


def _fault_of(folder: Path, files: Sequence[str]) -> str | None:
    for file in (MANIFEST, *files):
        # opening a pipe of that name would block
        if not (folder / file).is_file():
            return f"{file} is missing"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for file in files:
            size, written = (folder / file).stat().st_size, manifest[file]
            if size != written["bytes"]:
                return f"{file} has {size} bytes instead of {written['bytes']}"
            if manifest_entry((folder / file).read_bytes())["blake2b"] != written["blake2b"]:
                return f"{file} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({error})"
    return None


def _delete(folder: Path) -> None:
    # renamed first, so that a half-deleted folder is not taken for a checkpoint
    shutil.rmtree(folder.rename(folder.with_name(f"{UNFINISHED}{folder.name}-deleted")))


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    write_durably(unfinished, content)
    os.replace(unfinished, path)  # noqa: PTH105 (the one call whose atomicity matters, under the name POSIX gives it)
    sync_folder(path.parent)
