"""Rank losses of embeddings and scores. Importing the families fills `PRESETS`, the losses of the command line by name."""

from rankgrad.losses import average_precision, ndcg, recall
from rankgrad.losses.preset_registry import PRESETS

__all__ = ["PRESETS", "average_precision", "ndcg", "recall"]
