"""Sentence encoders of transformers and sentence-transformers as trunks, and their tokenizers.

A folder of sentence-transformers says how token states are pooled; one of transformers alone is pooled by their mean.
"""

import contextlib
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rankgrad._messages import install_hint, shorten
from rankgrad.models.trunks import Trunk, offline_if_unreachable

Pooling: TypeAlias = Literal["mean", "cls", "max"]

MODULES, CONFIG = "modules.json", "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
# tokens of a text where neither the folder nor the user says how many
DEFAULT_LENGTH = 128
# modules of sentence-transformers that this encoder is made of; embeddings are normalised in any case
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
TEXTS_AT_ONCE = 10_000


class TextEncoder(nn.Module):
    """Token numbers {"input_ids", "attention_mask"} [B, T] -> a vector [B, C] for each text."""

    def __init__(self, transformer: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.transformer, self.pooling = transformer, pooling

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        states: Tensor = self.transformer(**tokens).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        mask = tokens["attention_mask"][:, :, None].bool()
        if self.pooling == "max":
            return states.masked_fill(~mask, torch.finfo(states.dtype).min).amax(dim=1)
        weights = mask.to(torch.promote_types(states.dtype, torch.float32))
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class TextTokenizer:
    """Texts -> token numbers, for the encoder in a folder.

    Args:
        name: folder of the encoder, or its name on the Hugging Face Hub.
        max_length: tokens of a text at most; 0: what the folder says.
    """

    def __init__(self, name: str, max_length: int = 0) -> None:
        _require_transformers(name)
        from transformers import AutoTokenizer

        folder = Path(name).expanduser()
        _check_folder(name)
        if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise FileNotFoundError(
                f"build_model: {name} has no tokenizer: save it there with tokenizer.save_pretrained({str(folder)!r})"
            )
        try:
            with quiet_transformers(), _reachable(name):
                self._tokenizer: Any = AutoTokenizer.from_pretrained(_place(name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"build_model: the tokenizer of {name} cannot be loaded ({_first_line(error)}){_hint(name)}"
            ) from error
        most = _stated_length(folder, self._tokenizer)
        if max_length > most:
            raise ValueError(f"--max-length must be at most {most}, the longest text that {name} takes, got {max_length}")
        self.max_length = max_length or most
        self.name = name
        # a fast tokenizer refuses two threads at once
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(texts), TEXTS_AT_ONCE):
            with self._lock:
                part = self._tokenizer(list(texts[begin : begin + TEXTS_AT_ONCE]), truncation=True, max_length=self.max_length)
            found += part["input_ids"]
        return found

    def collate(self, tokens: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """One batch, padded to the longest text."""
        longest = max(map(len, tokens))
        pad = self._tokenizer.pad_token_id or 0
        numbers = torch.full((len(tokens), longest), pad)
        mask = torch.zeros(len(tokens), longest, dtype=torch.int64)
        for row, own in enumerate(tokens):
            numbers[row, : len(own)] = torch.tensor(own)
            mask[row, : len(own)] = 1
        return {"input_ids": numbers, "attention_mask": mask}

    def save(self, folder: Path) -> None:
        """Write its files."""
        self._tokenizer.save_pretrained(str(folder))


def is_text_folder(name: str) -> bool:
    """Whether `name` is the folder of an encoder of transformers or sentence-transformers."""
    folder = Path(name).expanduser()
    if (folder / MODULES).is_file():
        return True
    return "model_type" in _read_json(folder / CONFIG)


def build_text_trunk(name: str, *, pretrained: bool) -> Trunk:
    """The sentence encoder in the folder `name`, or of that name on the Hugging Face Hub."""
    _require_transformers(name)
    from transformers import AutoConfig, AutoModel

    folder = Path(name).expanduser()
    _check_folder(name)
    pooling = _pooling(folder)
    try:
        with quiet_transformers(), _reachable(name):
            if pretrained:
                transformer = _without_pooler(AutoModel.from_pretrained, _place(name), dtype=torch.float32)
            else:
                transformer = _without_pooler(AutoModel.from_config, AutoConfig.from_pretrained(_place(name)))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"build_model: the encoder {name} cannot be loaded ({_first_line(error)}){_hint(name)}") from error
    if not hasattr(transformer.config, "hidden_size"):
        raise ValueError(f"build_model: {name} is not a sentence encoder: its configuration has no hidden_size")
    channels = int(transformer.config.hidden_size)
    return Trunk(name, TextEncoder(transformer, pooling), channels, input_size=0, vectors=True)


def _reachable(name: str) -> contextlib.AbstractContextManager[None]:
    """Around loading: a folder needs no network, and without one the Hub's cache is used at once."""
    return contextlib.nullcontext() if Path(name).expanduser().exists() else offline_if_unreachable()


def _hint(name: str) -> str:
    return "" if Path(name).expanduser().exists() else "; without a network give the folder of a model: --trunk FOLDER"


def _check_folder(name: str) -> None:
    folder = Path(name).expanduser()
    if not folder.exists() and (folder.is_absolute() or name.startswith(".")):
        raise FileNotFoundError(f"build_model: the folder {name} of the sentence encoder does not exist")
    if folder.exists() and not is_text_folder(name):
        raise ValueError(
            f"build_model: {name} is not a sentence encoder: a folder of transformers or sentence-transformers with {CONFIG} "
            "is wanted"
        )


def _without_pooler(load: Any, *arguments: Any, **options: Any) -> Any:
    """BERT's pooler is for its own task: its weights would never get a gradient."""
    try:
        return load(*arguments, add_pooling_layer=False, **options)
    except TypeError:
        return load(*arguments, **options)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the bars and the report of transformers, which lists the pooler among what is missing."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def _place(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder) if folder.exists() else name


def _pooling(folder: Path) -> Pooling:
    """What 1_Pooling/config.json says; the mean where there is none."""
    for module in _modules(folder):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in KNOWN_MODULES:
            raise ValueError(
                f"build_model: {folder} has a module {kind}, which is not supported: wanted are {', '.join(KNOWN_MODULES)}"
            )
        if kind == "Pooling":
            return _pooling_of(_read_json(folder / module["path"] / CONFIG), folder)
    return "mean"


def _modules(folder: Path) -> Iterator[Mapping[str, Any]]:
    path = folder / MODULES
    if path.is_file():
        try:
            yield from json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"build_model: {path} is damaged ({_first_line(error)})") from error


def _pooling_of(settings: Mapping[str, Any], folder: Path) -> Pooling:
    named: dict[str, Pooling] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
    }
    words: dict[Any, Pooling] = {"mean": "mean", "cls": "cls", "max": "max"}
    chosen = [settings["pooling_mode"]] if isinstance(settings.get("pooling_mode"), str) else []
    found = [words[word] for word in chosen if word in words]
    found += [pooling for key, pooling in named.items() if settings.get(key) is True]
    others = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True and key not in named]
    if len(found) != 1 or others or len(chosen) > 1:
        raise ValueError(
            f"build_model: the pooling of {folder} must be one of mean, cls and max, got {shorten(dict(settings))}"
        )
    return found[0]


def _stated_length(folder: Path, tokenizer: Any) -> int:
    stated = _read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    positions = _read_json(folder / CONFIG).get("max_position_embeddings")
    limits = [int(number) for number in (stated, tokenizer.model_max_length, positions) if isinstance(number, int)]
    # a tokenizer without a limit says 10^30
    known = [number for number in limits if 0 < number < 10**9]
    return min(known) if known else DEFAULT_LENGTH


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _require_transformers(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"build_model: the encoder {name} needs transformers, which is missing. Install it with "
            f"{install_hint('hugging-face')}",
            name="transformers",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
