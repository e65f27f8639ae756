"""A trained sentence encoder as a folder of sentence-transformers, loaded again where that library is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn

from rankgrad._files import atomic_folder
from rankgrad.models.text_trunks import TextEncoder, quiet_transformers
from rankgrad.search.trained_model import TrainedModel

FORMAT = "sentence-transformers"
# embeddings have length 1; another order of float32 sums moves them by a hundredth of this
TOLERANCE = 1e-4
PURPOSES = {
    "README.md": "this card",
    "model.safetensors": "the weights; config.json describes the transformer",
    "tokenizer.json": "the tokenizer; tokenizer_config.json has its settings",
    "modules.json": "how sentence-transformers puts transformer, pooling and normalisation together",
}
EXAMPLES = ("a short text", "another text, which is a little longer than the first one", "?")
_MODULES = "sentence_transformers.models"


def export_sentence_encoder(trained: TrainedModel, folder: Path, card: str = "") -> float:
    """Write the encoder of a run to a new folder; the largest difference of embeddings, or NaN where it was not compared.

    Args:
        trained: from `load`, of a run on texts.
        folder: must not exist, or be empty.
        card: text of README.md, "" for none.
    """
    model, tokenizer = trained.model, trained.tokenizer
    if tokenizer is None or not isinstance(model.trunk, TextEncoder):
        raise ValueError(f"export: {FORMAT} is for runs on texts, and {trained.folder} is one on images")
    with atomic_folder(folder) as unfinished:
        transformer: Any = model.trunk.transformer
        with quiet_transformers():
            transformer.save_pretrained(str(unfinished))
        tokenizer.save(unfinished)
        norm, linear = model.head.norm, model.head.linear
        kinds = ["Transformer", "Pooling", *(["LayerNorm"] if norm else []), *(["Dense"] if linear else []), "Normalize"]
        modules = [(kind, f"{number}_{kind}" if number else "") for number, kind in enumerate(kinds)]
        places = {kind: unfinished / path for kind, path in modules}
        described = [
            {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
            for number, (kind, path) in enumerate(modules)
        ]
        _write(unfinished / "modules.json", described)
        _write(unfinished / "sentence_bert_config.json", {"max_seq_length": tokenizer.max_length, "do_lower_case": False})
        flags = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
        pooling = {f"pooling_mode_{flag}": name == model.trunk.pooling for name, flag in flags.items()}
        _write(places["Pooling"] / "config.json", {"word_embedding_dimension": model.channels, **pooling})
        if norm is not None:
            _write(places["LayerNorm"] / "config.json", {"dimension": model.channels})
            save_file(_state(norm, "norm"), places["LayerNorm"] / "model.safetensors")
        if linear is not None:
            activation = "torch.nn.modules.linear.Identity"
            shape = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": True}
            _write(places["Dense"] / "config.json", {**shape, "activation_function": activation})
            save_file(_state(linear, "linear"), places["Dense"] / "model.safetensors")
        places["Normalize"].mkdir()
        if card:
            (unfinished / "README.md").write_text(card, encoding="utf-8")
        error = _error(trained, unfinished)
        if error > TOLERANCE:
            raise ValueError(
                f"export: the embeddings of {folder} differ from the model's by {error:.2g}, more than the {TOLERANCE:g} that "
                "rounding explains; nothing was written"
            )
    return error


def _error(trained: TrainedModel, folder: Path) -> float:
    if importlib.util.find_spec("sentence_transformers") is None:
        return float("nan")
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        loaded = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    found = np.asarray(loaded.encode(list(EXAMPLES), show_progress_bar=False))
    return float(np.abs(found - trained.embed_texts(EXAMPLES)).max())


def _state(layer: nn.Module, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": value.contiguous() for key, value in layer.state_dict().items()}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
