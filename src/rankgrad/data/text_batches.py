"""Texts as token numbers, and the batches of an epoch made of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.data.samplers import BatchSampler, checked_integers


class Tokenizer(Protocol):
    """What turns texts into token numbers."""

    def __call__(self, texts: Sequence[str]) -> list[list[int]]: ...

    def collate(self, tokens: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """One batch, padded to the longest text: input of the encoder."""
        ...


class TokenizedTexts:
    """The texts of a table, tokenised once.

    Args:
        texts: one per row.
        tokenizer: of the encoder that is trained.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokenizer(texts)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some of them, padded."""
        return self.tokenizer.collate([self.tokens[row] for row in rows])


class TextBatches:
    """The batches of an epoch, in order, from any position.

    Args:
        source: the texts.
        labels: one integer per text.
        sampler: which texts make a batch.
        device: where tokens and labels end up.
        shard: (i, n) gives the i-th of n contiguous shards of every batch, counted from 0.

    Attributes:
        item_names: names of the texts, for messages about a batch; None where they are not known.
    """

    item_names: Sequence[str] | None = None
    noun = "text"

    def __init__(
        self,
        source: TokenizedTexts,
        labels: ArrayLike,
        sampler: BatchSampler,
        device: torch.device | str = "cpu",
        *,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.labels = torch.from_numpy(checked_integers(labels, name="labels", caller="TextBatches"))
        if len(self.labels) != len(source):
            raise ValueError(f"TextBatches: labels must have one entry per text, {len(source)}, got {len(self.labels)}")
        self.source, self.sampler, self.device, self.shard = source, sampler, torch.device(device), shard
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        check_count(epoch, name="epoch", caller="TextBatches.set_epoch", least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def iterate(self, start: int = 0) -> Iterator[tuple[int, Tensor, dict[str, Any], Tensor]]:
        """The batches of the epoch from step `start` on: step, rows, tokens, labels."""
        self.sampler.set_epoch(self.epoch)
        self.sampler.load_state_dict({**self.sampler.state_dict(), "epoch": self.epoch, "position": start})
        i, n = self.shard
        for step, batch in enumerate(self.sampler, start):
            if len(batch) < n:
                raise ValueError(f"TextBatches: the batch of step {step} has {len(batch)} texts, too few for {n} processes")
            rows = batch[len(batch) * i // n : len(batch) * (i + 1) // n]
            tokens = {name: values.to(self.device) for name, values in self.source.batch(rows).items()}
            indices = torch.tensor(rows)
            yield step, indices, tokens, self.labels[indices].to(self.device)
