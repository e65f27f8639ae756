"""What training writes, damaged or forged: weights, checkpoints, recipe files."""

import contextlib
import hashlib
import io
import json
import random
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fake_datasets
import torch
from safetensors.torch import save

from benchmarks.trials.corruption import (
    MaliciousPickle,
    copy_tree,
    damaged,
    edit_json,
    edit_line,
    malicious_pickle,
    put,
    random_entry,
    replaced,
)
from benchmarks.trials.fuzz_case import Case, command
from rankgrad.models import ModelSpec, build_model
from rankgrad.recipes.catalogue import find
from rankgrad.runs.pipeline import start_run
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.search import build_index, embed_images, folder_of_images, load
from rankgrad.train.checkpoints import MANIFEST, STATE, WEIGHTS, CheckpointStore
from rankgrad.train.state_file import read_state, state_bytes

CPU = torch.device("cpu")


class Runs:
    """A trained run with its test, embeddings and index, made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _made(self) -> Path:
        folder = self.root / "run"
        if not folder.exists():
            data = fake_datasets.build("folder", self.root / "data", classes=6, per_class=4)
            recipe = (
                find("own-images").debug_version().with_settings({"validation": "half", "memory": 1, "loss": "rambo-recall"})
            )
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                start_run(RetrievalTask(recipe, RunContext(data, CPU)), RunFolder(folder))
        return folder

    def run(self, folder: Path) -> Path:
        return copy_tree(self._made(), folder)

    def embeddings(self, folder: Path, ids: str) -> Path:
        made = self.root / f"embeddings-{ids}"
        if not made.exists():
            model = load(self._made(), "cpu")
            images = folder_of_images(self.root / "data" / "test")
            gallery = embed_images(model, images, made, ids="csv" if ids == "csv" else "parquet", shown=False)
            build_index(gallery, made, kind="hnsw", shown=False)
        return copy_tree(made, folder)


class Weights:
    """Files of weights to begin with, as people find them."""

    name = "weights"

    def __init__(self) -> None:
        self.good = build_model(ModelSpec(trunk="convnet", dim=8)).state_dict()

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        folder.mkdir()
        suffix = rng.choice((".safetensors", ".pt", ".pth", ".bin", ".tar"))
        path = folder / f"trunk{suffix}"
        draw, refused = rng.random(), False
        if draw < 0.35:
            what, content = damaged(self._file(suffix, dict(self.good)), rng)
        elif draw < 0.45:
            what, content = f"{suffix} with the content of another kind", self._file(".pt", dict(self.good))
        elif draw < 0.65 and suffix != ".safetensors":
            what, content, refused = "a program in it", self._hostile(canary, rng), True
        elif draw < 0.75 and suffix == ".safetensors":
            what, content, refused = self._lying_head(rng)
        elif draw < 0.8:
            put(path, b"")
            what, content = replaced(path, rng), None
        else:
            state: dict[Any, Any] = dict(self.good)
            what = rng.choice(tuple(_STATE_CHANGES))
            state = _STATE_CHANGES[what](state)
            content, refused = self._file(suffix, state), True
        if content is not None:
            put(path, content)
        spec = ModelSpec(trunk="convnet", dim=8, weights=str(path))
        return Case(f"{path.name}: {what}", partial(build_model, spec), (path.name,), refused)

    def _file(self, suffix: str, state: dict[Any, Any]) -> bytes:
        if suffix == ".safetensors" and all(isinstance(key, str) and _is_dense(value) for key, value in state.items()):
            return save({name: value.contiguous() for name, value in state.items()})
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def _hostile(self, canary: Path, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return malicious_pickle(canary, rng)
        file = io.BytesIO()
        torch.save({**self.good, "optimizer": MaliciousPickle(canary)}, file, _use_new_zipfile_serialization=rng.random() < 0.7)
        return file.getvalue()

    def _lying_head(self, rng: random.Random) -> tuple[str, bytes, bool]:
        content = save({name: value.contiguous() for name, value in self.good.items()})
        length = struct.unpack("<Q", content[:8])[0]
        head, body = json.loads(content[8 : 8 + length]), content[8 + length :]
        entry = rng.choice(sorted(head))
        what, change = rng.choice(
            (
                ("a huge head", None),
                ("offsets beyond the end", {"data_offsets": [0, 10**12]}),
                ("offsets the wrong way", {"data_offsets": [100, 4]}),
                ("a negative shape", {"shape": [-1, 4]}),
                ("a huge shape", {"shape": [2**40, 2**40]}),
                ("an unknown type", {"dtype": "Q99"}),
            )
        )
        if change is None:
            return what, struct.pack("<Q", 2**62) + content[8:], True
        head[entry] |= change
        text = json.dumps(head).encode()
        return what, struct.pack("<Q", len(text)) + text + body, True


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _renamed(state: dict[Any, Any], name: Callable[[str], Any]) -> dict[Any, Any]:
    return {name(key): value for key, value in state.items()}


def _one(state: dict[Any, Any], change: Callable[[torch.Tensor], Any]) -> dict[Any, Any]:
    key = next(key for key in state if key.startswith("trunk.") and state[key].ndim > 1)
    return {**state, key: change(state[key])}


_STATE_CHANGES: Mapping[str, Callable[[dict[Any, Any]], dict[Any, Any]]] = {
    "other names": lambda state: {f"layer{i}": value for i, value in enumerate(state.values())},
    "numbers as names": lambda state: dict(enumerate(state.values())),
    "some numbers as names": lambda state: {3: torch.zeros(1), **_one(state, lambda value: value[:1])},
    "tuples as names": lambda state: _renamed(state, lambda key: (key,)),
    "a weight gone": lambda state: {k: v for i, (k, v) in enumerate(state.items()) if i != 5 and "num_batches" not in k},
    "another shape": lambda state: _one(state, lambda value: value[..., :1]),
    "no tensors": lambda state: dict.fromkeys(state, 1.0),
    "nothing": lambda state: {},
    "complex numbers": lambda state: _one(state, lambda value: value.to(torch.complex64)),
    "nan": lambda state: _one(state, lambda value: value * torch.nan),
    "infinities": lambda state: _one(state, lambda value: value / 0),
    "a sparse tensor": lambda state: _one(state, lambda value: value.to_sparse()),
    "a tensor without content": lambda state: _one(state, lambda value: value.to("meta")),
    "deep nesting": lambda state: {"model": {"model": {"teacher": {"weights": {"x": 1}}}}},
}


class Checkpoints:
    """Checkpoints of a run, opened to test, to search and to go on with it."""

    name = "checkpoints"

    def __init__(self, good: Runs) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        run = self.good.run(folder)
        places = run / "checkpoints"
        last = places / json.loads((places / "last.json").read_text())["folder"]
        draw = rng.random()
        # one that is not as it was written must never be loaded
        if draw < 0.05:
            path = run / "journal.jsonl"
            what = edit_line(path, rng)
        elif draw < 0.2:
            path = last / rng.choice((WEIGHTS, STATE))
            what, content = damaged(path.read_bytes(), rng)
            put(path, content)
        elif draw < 0.4:
            path = last / rng.choice((WEIGHTS, STATE))
            what, content = self._forged(path, canary, rng)
            put(path, content)
            _sign(last)
        elif draw < 0.55:
            path = places / rng.choice(("last.json", "best.json"))
            what = edit_json(path, rng)
        elif draw < 0.7:
            path = last / MANIFEST
            what = edit_json(path, rng)
        elif draw < 0.85:
            path = rng.choice((places / "last.json", places / "best.json", last / WEIGHTS, last / STATE, last / MANIFEST, last))
            what = replaced(path, rng)
        else:
            name = rng.choice(("step-x", "step--1", "step-", f"step-{'9' * 30}", "step-00000099", "step-\u0663", "a\nb"))
            path = places / name
            path.mkdir()
            put(path / WEIGHTS, b"x")
            what = "a folder of that name"
        names = (path.name, last.name, "last.json", "best.json", str(places))
        return Case(f"{path.relative_to(run)}: {what}", _opening(run, rng), names)

    def _forged(self, path: Path, canary: Path, rng: random.Random) -> tuple[str, bytes]:
        """Not what was written, but with a manifest that says so."""
        if path.name == WEIGHTS:
            what, content = damaged(path.read_bytes(), rng)
            return f"{what}, signed", content
        if rng.random() < 0.4:
            return "a program in it, signed", malicious_pickle(canary, rng)
        state = read_state(path)
        part = rng.choice(sorted(state))
        # what is inside the optimizer and the loss is theirs; of the rest every place
        owner, key = state, part
        if part in ("position", "settings", "identity") and rng.random() < 0.7:
            part, owner, key = random_entry(state[part], rng)
        if rng.random() < 0.3:
            del owner[key]
            what = f"{part} gone, signed"
        else:
            owner[key] = rng.choice((None, 7, "x", [], {"x": 1}, torch.zeros(2), -1))
            what = f"{part} = {str(owner[key])[:20]}, signed"
        return what, state_bytes(state)


def _sign(folder: Path) -> None:
    manifest = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "blake2b": hashlib.blake2b((folder / name).read_bytes(), digest_size=16).hexdigest(),
        }
        for name in (WEIGHTS, STATE)
    }
    put(folder / MANIFEST, json.dumps(manifest).encode())


def _opening(run: Path, rng: random.Random) -> Callable[[], object]:
    quiet = ("--device", "cpu", "--cache", "none", "--no-tensorboard")
    return rng.choice(
        (
            partial(load, run, "cpu", rng.choice((None, "best", "last"))),
            partial(_newest, run),
            partial(command, "train", "--resume", str(run), *quiet),
        )
    )


def _newest(run: Path) -> None:
    found, _ = CheckpointStore(run / "checkpoints").newest_good()
    if found is not None:
        found.weights()
        found.state()


class RecipeFiles:
    """recipe.json of a run, which says what `--resume`, `eval` and `search` build."""

    name = "recipe files"

    def __init__(self, good: Runs) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        run = self.good.run(folder)
        path = run / "recipe.json"
        what = replaced(path, rng) if rng.random() < 0.06 else edit_json(path, rng)
        call = rng.choice(
            (
                partial(RunFolder(run).read_recipe, RetrievalRecipe),
                partial(RunFolder(run).read_recipe, RetrievalRecipe),
                partial(command, "eval", str(run), "--data", str(folder / "nowhere"), "--device", "cpu"),
            )
        )
        return Case(f"recipe.json: {what}", call, ("recipe.json", str(folder / "nowhere")))
