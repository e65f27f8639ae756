"""One training loop for every loss: the same texts, steps, optimizer and evaluation."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import rankgrad as rg
from benchmarks.text.intents import DATA, Intents, Rows, split
from benchmarks.text.losses import LOSSES, Columns

METRICS = ("R@1", "mAP", "mAP@R")
WARMUP_SHARE = 0.1
WEIGHT_DECAY = 0.01
EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Place:
    """Where a run takes place: what it reads, on which device."""

    data: Path
    model: Path
    device: str
    max_length: int


@dataclass(frozen=True)
class Run:
    """A training run, or with an empty `loss` the evaluation of the untrained model."""

    stage: str
    data: str
    split: str
    loss: str
    setting: str
    lr: float
    batch: int
    mini_batch: int
    seed: int
    texts: int

    @property
    def steps(self) -> int:
        return max(1, self.texts // self.batch) if self.loss else 0


class Encoder:
    """The pretrained model, with its weights of the start kept, and the tokenised texts of the data sets."""

    def __init__(self, place: Place) -> None:
        self.place, self.device = place, torch.device(place.device)
        self.model = SentenceTransformer(str(place.model), device=place.device, local_files_only=True).float()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.device.type == "cuda":
            _compute_in_bf16(self.model[0], self.device)
        self._data: dict[str, tuple[Intents, Tensor, Rows]] = {}

    def data(self, name: str) -> tuple[Intents, Tensor, Rows]:
        """Intents, token numbers [N, L] on the device and the length of each text."""
        if name not in self._data:
            intents = DATA[name](self.place.data)
            found = self.model.tokenizer(
                intents.texts, padding=True, truncation=True, max_length=self.place.max_length, return_tensors="pt"
            )
            lengths = found["attention_mask"].sum(dim=1).numpy()
            self._data[name] = intents, found["input_ids"].to(self.device), lengths
        return self._data[name]

    def features(self, name: str, rows: Rows) -> dict[str, Tensor]:
        """Input of the model: padded to the longest of these texts, rounded up to a multiple of 8."""
        _, tokens, lengths = self.data(name)
        longest = min(-(-int(lengths[rows].max()) // 8) * 8, tokens.shape[1])
        index = torch.from_numpy(rows).to(self.device)
        own = torch.from_numpy(lengths[rows]).to(self.device)
        mask = torch.arange(longest, device=self.device) < own[:, None]
        return {"input_ids": tokens[index, :longest], "attention_mask": mask.long()}

    @torch.inference_mode()
    def embed(self, name: str, rows: Rows) -> Tensor:
        self.model.eval()
        order = np.argsort(self.data(name)[2][rows], kind="stable")
        parts = [
            self.model(self.features(name, rows[order[begin : begin + EVALUATION_BATCH]]))["sentence_embedding"].float()
            for begin in range(0, len(rows), EVALUATION_BATCH)
        ]
        found = torch.cat(parts)
        return found[torch.from_numpy(np.argsort(order)).to(found.device)]


@lru_cache(maxsize=1)
def _encoder(place: Place) -> Encoder:
    return Encoder(place)


def train_and_evaluate(run: Run, place: Place) -> dict[str, Any]:
    """Metrics of a run with their intervals over intents, AP by intent, and the seconds of training."""
    encoder = _encoder(place)
    intents, _, _ = encoder.data(run.data)
    parts = split(intents, run.split)
    encoder.model.load_state_dict(encoder.start)
    torch.manual_seed(run.seed)
    started = time.perf_counter()
    if run.loss:
        _train(run, encoder, parts.train)
    if encoder.device.type == "cuda":
        torch.cuda.synchronize(encoder.device)
    seconds = time.perf_counter() - started
    gallery = None if parts.gallery is None else encoder.embed(run.data, parts.gallery)
    result = rg.evaluate(
        encoder.embed(run.data, parts.test),
        intents.labels[parts.test],
        gallery,
        None if parts.gallery is None else intents.labels[parts.gallery],
        ks=(1,),
    )
    bounds = result.intervals(by="class")
    found: dict[str, Any] = {"seconds": f"{seconds:.2f}", "queries": len(result.query_index)}
    for metric in METRICS:
        values = {"": result[metric], " low": bounds[metric][0], " high": bounds[metric][1]}
        found |= {f"{metric}{suffix}": f"{value:.6f}" for suffix, value in values.items()}
    classes = result.by_class().values()
    found["queries by intent"] = " ".join(str(int(each["queries"])) for each in classes)
    found["mAP by intent"] = " ".join(f"{each['mAP']:.4f}" for each in classes)
    return found


def _train(run: Run, encoder: Encoder, rows: Rows) -> None:
    labels = encoder.data(run.data)[0].labels
    chosen = LOSSES[run.loss]
    loss = chosen.settings[run.setting](encoder.model, run.mini_batch).to(encoder.device)
    fused = encoder.device.type == "cuda"
    optimizer = torch.optim.AdamW(encoder.model.parameters(), lr=run.lr, weight_decay=WEIGHT_DECAY, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    encoder.model.train()
    for batch in batches(labels[rows], run.batch, chosen.together, run.steps, run.seed):
        columns, target = _columns(chosen.columns, rows[batch], labels)
        value = loss(
            [encoder.features(run.data, column) for column in columns],
            None if target is None else torch.from_numpy(target).to(encoder.device),
        )
        value.backward()
        torch.nn.utils.clip_grad_norm_(encoder.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear to zero, as in sentence-transformers' trainer."""
    warmup = math.ceil(WARMUP_SHARE * steps)
    return (step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup)


def batches(labels: Rows, batch: int, together: int, steps: int, seed: int) -> Iterator[Rows]:
    """Batches of `together` texts of an intent each, no intent again in a batch before all the others.

    Texts of an intent come in random order, all of them before one is repeated.
    """
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    waiting: list[list[int]] = [[] for _ in members]
    groups = batch // together
    rounds = -(-groups // len(members))
    for _ in range(steps):
        found: list[int] = []
        for group in np.concatenate([rng.permutation(len(members)) for _ in range(rounds)])[:groups]:
            while len(waiting[group]) < together:
                waiting[group] = rng.permutation(members[group]).tolist() + waiting[group]
            found += [waiting[group].pop() for _ in range(together)]
        yield np.array(found)


def _columns(kind: Columns, rows: Rows, labels: Rows) -> tuple[list[Rows], Any]:
    if kind == "text":
        return [rows], labels[rows]
    first, second = rows[0::2], rows[1::2]
    if kind == "pair":
        return [first, second], None
    half = len(second) // 2
    second = np.concatenate((np.roll(second[:half], 1), second[half:]))
    return [first, second], (labels[first] == labels[second]).astype(np.float32)


def _compute_in_bf16(transformer: Any, device: torch.device) -> None:
    """The transformer in bfloat16, whatever is computed from its output in float32."""
    plain = transformer.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            found = plain(*arguments, **options)
        found["token_embeddings"] = found["token_embeddings"].float()
        return found

    transformer.forward = forward
