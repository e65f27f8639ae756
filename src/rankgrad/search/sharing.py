"""A folder to share: the model of a run and what others need to use it, without the images it was trained on.

    README.md             the model card
    model.safetensors     the weights, the very bytes of the checkpoint; manifest.json has their digest
    recipe.json           settings, preprocessing and class names, as in the folder of a run
    data.json, eval/      fingerprints of the data, results
    model.json            sizes and preprocessing for other programs; preprocess.py does the latter
    model.onnx            for onnxruntime, where the packages that write it are installed

`rankgrad.load` and the commands open it like the folder of a run. Paths of this machine stay here.
"""

import importlib.util
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankgrad._files import atomic_folder
from rankgrad.runs.run_folder import SHARED_WEIGHTS, RunFile, RunFolder
from rankgrad.search.export import ABOUT, FILES, PREPROCESS, export_model, write_description
from rankgrad.search.trained_model import TrainedModel
from rankgrad.train.checkpoints import MANIFEST, manifest_entry

CARD = "README.md"
TRUNK, TRUNK_CONFIG = "trunk", "config.json"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

PURPOSES = {
    CARD: "this card",
    SHARED_WEIGHTS: f"the weights; {MANIFEST} has their digest",
    "recipe.json": "all settings, the preprocessing, the names of the classes",
    ABOUT: f"sizes and preprocessing for other programs; {PREPROCESS} does the latter and needs Pillow and numpy only",
    FILES["onnx"]: 'the network for onnxruntime: input "pixels", output "embeddings"',
}


def can_write_onnx() -> bool:
    """Whether the packages of the search extra that write and check ONNX are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ONNX_PACKAGES)


def share(trained: TrainedModel, folder: Path, card: str, *, onnx: bool) -> None:
    """Write a folder to share, which appears when it is complete.

    Args:
        trained: from `load`.
        folder: must not exist, or be empty.
        card: text of README.md.
        onnx: write model.onnx, too, and check it against the model.
    """
    run = RunFolder(trained.folder)
    weights = run.checkpoint(trained.checkpoint).path.read_bytes()
    with atomic_folder(folder) as unfinished:
        (unfinished / SHARED_WEIGHTS).write_bytes(weights)
        manifest = {"checkpoint": trained.checkpoint, "step": trained.step, SHARED_WEIGHTS: manifest_entry(weights)}
        _write_json(unfinished / MANIFEST, manifest)
        _write_json(unfinished / run.recipe_file.name, _without_paths(run.read(), unfinished).as_dict())
        if run.data_file.is_file():
            shutil.copyfile(run.data_file, unfinished / run.data_file.name)
        for result in run.eval.glob("[!.]*/result.json"):
            _copy_result(result, unfinished / result.relative_to(run.path))
        if onnx:
            export_model(trained, "onnx", unfinished)
        else:
            write_description(trained, unfinished)
        (unfinished / CARD).write_text(card, encoding="utf-8")


def _without_paths(content: RunFile, folder: Path) -> RunFile:
    """What the run is of, without the paths of this machine; a timm model on disk leaves its description in `folder`."""
    settings = {name: _without_path(value) for name, value in content.settings.items()}
    config = Path(str(content.settings.get("trunk", ""))).expanduser() / TRUNK_CONFIG
    if config.is_file():
        (folder / TRUNK).mkdir()
        shutil.copyfile(config, folder / TRUNK / TRUNK_CONFIG)
        settings["trunk"] = f"./{TRUNK}"
    return replace(content, data=None, settings=settings)


def _without_path(value: Any) -> Any:
    is_path = isinstance(value, str) and Path(value).expanduser().is_absolute()
    return Path(value).name if is_path else value


def _copy_result(path: Path, to: Path) -> None:
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in content.items() if name != "root"}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {**kept["data"], "path": None}
    to.parent.mkdir(parents=True)
    _write_json(to, kept)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
