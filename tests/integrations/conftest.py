"""Tiny random networks and texts for the adapters."""

import pytest
from tiny_encoder import bert

WORDS = ["card", "lost", "stolen", "balance", "transfer", "late", "fee", "wrong", "pin", "blocked", "new", "limit"]
# a text repeats the two words of its class among others
TEXTS = [
    f"{WORDS[2 * c]} {WORDS[2 * c + 1]} {WORDS[(7 * c + i) % 12]} {WORDS[(5 * i) % 12]}" for c in range(6) for i in range(8)
]
CLASSES = [c for c in range(6) for _ in range(8)]


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A BERT of two layers with random weights, and its tokenizer, on disk."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    bert(folder, WORDS, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
    return folder
