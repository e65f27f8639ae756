"""The model for use elsewhere: each file is loaded again and must give the embeddings of the original.

    safetensors    model.safetensors     for rankgrad.models.build_model with the spec of model.json
    torch          model.pt2             for torch.export.load, without rankgrad
    onnx           model.onnx            for onnxruntime and others, input "pixels", output "embeddings"

All take float32 pixels of 0..255, [B, 3, size, size] of any B, and give unit embeddings [B, dim]. Beside them are written
model.json, with the spec, sizes and preprocessing, and preprocess.py, which turns an image into the very pixels that
`rankgrad embed` gives the model, and needs only Pillow and numpy.
"""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad._checks import check_choice
from rankgrad._files import atomic_file, replace_file
from rankgrad.models import ModelSpec, build_model
from rankgrad.search.trained_model import TrainedModel

FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
ABOUT, PREPROCESS = "model.json", "preprocess.py"
SCRIPT = Path(__file__).with_name("exported_preprocess.py")
# embeddings have length 1; another order of float32 sums moves them by a hundredth of this
TOLERANCE = 1e-4
# one, and others than what the graph was traced with
BATCHES = (1, 3)


@dataclass(frozen=True)
class Exported:
    """A file and the largest difference between its embeddings and the original's."""

    path: Path
    max_error: float


def export_model(trained: TrainedModel, kind: str, folder: Path) -> Exported:
    """Write the model of a run, load what was written and compare the two.

    Args:
        trained: from `load`.
        kind: "safetensors", "torch" or "onnx".
        folder: for the file, model.json and preprocess.py; files of these names are replaced.
    """
    check_choice(kind, FILES, name="format", caller="export_model")
    original = _Embedding(trained)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILES[kind]
    with atomic_file(path) as unfinished:
        _WRITERS[kind](original, unfinished, trained)
        error = _largest_error(original, _READERS[kind](unfinished, trained), trained.recipe.size)
        if not error <= TOLERANCE:
            raise ValueError(
                f"export: the embeddings of {path.name} differ from the model's by {error:.2g}, more than the "
                f"{TOLERANCE:g} that rounding explains; nothing was written. Try another --format"
            )
    write_description(trained, folder)
    return Exported(path, error)


def write_description(trained: TrainedModel, folder: Path) -> None:
    """Write model.json and preprocess.py."""
    replace_file(folder / ABOUT, f"{json.dumps(description(trained), indent=1)}\n")
    replace_file(folder / PREPROCESS, SCRIPT.read_text(encoding="utf-8"))


def description(trained: TrainedModel) -> dict[str, Any]:
    """What model.json says."""
    recipe, preprocess = trained.recipe, trained.preprocess
    if preprocess.native_shape:
        steps = [f"shrink until the long side is {recipe.size}; the exported graph takes squares of that size"]
    else:
        resized = "both sides" if preprocess.square else "the short side"
        steps = [
            "apply the EXIF orientation, convert to 8-bit RGB",
            f"resize {resized} to {preprocess.stored_side} pixels"
            + ("" if preprocess.square else ", the long side in proportion and rounded down")
            + ": bilinear with antialiasing, rounded to 8 bits",
            f"crop the {recipe.size} x {recipe.size} pixels in the middle, offsets rounded half to even",
            f"convert to float32 of 0..255, channels first; {PREPROCESS} does all of this",
        ]
    return {
        "run": trained.folder.resolve().name,
        "recipe": recipe.name,
        "step": trained.step,
        "weights": trained.fingerprint,
        "spec": {**asdict(trained.model.spec), "weights": FILES["safetensors"]},
        "dim": trained.model.dim,
        "size": recipe.size,
        "scales": list(recipe.scales),
        "input": {"name": "pixels", "shape": ["batch", 3, recipe.size, recipe.size], "values": "float32, 0..255"},
        "output": {"name": "embeddings", "shape": ["batch", trained.model.dim], "values": "float32, length 1"},
        "preprocessing": preprocess.as_dict(),
        "preparation": steps,
    }


class _Embedding(nn.Module):
    """A copy of the model at all its scales, on the CPU in float32, with nothing to train."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(trained.model).cpu().float().eval()
        self.scales = trained.recipe.scales
        self.requires_grad_(False)
        for tensor in (*self.parameters(), *self.buffers()):
            # files hold contiguous tensors, whatever layout training chose
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)

    def forward(self, pixels: Tensor) -> Tensor:
        embeddings = torch.stack([self._at(pixels, scale) for scale in self.scales]).mean(0)
        return F.normalize(embeddings)

    def _at(self, pixels: Tensor, scale: float) -> Tensor:
        size = [max(1, round(side * scale)) for side in pixels.shape[-2:]]
        shown = pixels if scale == 1.0 else F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        found: Tensor = self.model(shown)
        return found


def _write_safetensors(model: _Embedding, path: Path, trained: TrainedModel) -> None:
    from safetensors.torch import save

    # a tensor with two names is written twice, which the format wants
    tensors = {name: value.clone() for name, value in model.model.state_dict().items()}
    metadata = {"format": "pt", "weights": trained.fingerprint, "trunk": trained.model.spec.trunk}
    path.write_bytes(save(tensors, metadata=metadata))


def _read_safetensors(path: Path, trained: TrainedModel) -> Callable[[Tensor], Tensor]:
    spec = ModelSpec(**{**asdict(trained.model.spec), "weights": str(path)})
    return _Embedding(replace(trained, model=build_model(spec, seed=0)))


def _write_torch(model: _Embedding, path: Path, trained: TrainedModel) -> None:
    torch.export.save(_traced(model, trained), str(path))


def _traced(model: _Embedding, trained: TrainedModel) -> "torch.export.ExportedProgram":
    example = torch.rand(2, 3, trained.recipe.size, trained.recipe.size) * 255
    batch = torch.export.Dim("batch", min=1)
    # strict tracing would put the network's autocast regions into the graph
    return torch.export.export(model, (example,), dynamic_shapes={"pixels": {0: batch}}, strict=False)


def _read_torch(path: Path, trained: TrainedModel) -> Callable[[Tensor], Tensor]:
    return torch.export.load(str(path)).module()


def _write_onnx(model: _Embedding, path: Path, trained: TrainedModel) -> None:
    with _quiet():
        torch.onnx.export(
            _traced(model, trained),
            (),
            path,
            dynamo=True,
            input_names=["pixels"],
            output_names=["embeddings"],
            external_data=False,
            verbose=False,
        )
    _drop_traces(path)


def _drop_traces(path: Path) -> None:
    """Remove where in whose source files each node was made, which nobody else should see."""
    import onnx

    content = onnx.load(path)
    for graph in (content.graph, *content.functions):
        for part in (graph, *graph.node, *graph.value_info):
            part.ClearField("metadata_props")
            part.ClearField("doc_string")
    onnx.save(content, path)


def _read_onnx(path: Path, trained: TrainedModel) -> Callable[[Tensor], Tensor]:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def embed(pixels: Tensor) -> Tensor:
        found: NDArray[np.float32] = session.run(["embeddings"], {"pixels": pixels.numpy()})[0]
        return torch.from_numpy(found)

    return embed


_WRITERS: Mapping[str, Callable[[_Embedding, Path, TrainedModel], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "onnx": _write_onnx,
}
_READERS: Mapping[str, Callable[[Path, TrainedModel], Callable[[Tensor], Tensor]]] = {
    "safetensors": _read_safetensors,
    "torch": _read_torch,
    "onnx": _read_onnx,
}


@torch.no_grad()
def _largest_error(original: nn.Module, loaded: Callable[[Tensor], Tensor], size: int) -> float:
    errors = [float((original(pixels) - loaded(pixels)).abs().max()) for pixels in _examples(size)]
    # max() skips a NaN that does not come first
    return float(np.max(errors))


def _examples(size: int) -> Iterator[Tensor]:
    """Noise, and images that are smooth and have edges as photographs do, in several batch sizes."""
    generator = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        yield 255 * torch.rand(batch, 3, size, size, generator=generator)
        coarse = torch.rand(batch, 3, 5, 5, generator=generator)
        smooth = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
        smooth[:, :, size // 3 : size // 2, size // 4 :] *= 0.3
        yield (255 * smooth).round()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about itself."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
