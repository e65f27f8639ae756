"""Embeddings -> ranks of relevant items -> metrics under a named protocol."""

from rankgrad.eval.evaluation import evaluate, evaluate_table, expected_memory
from rankgrad.eval.given_scores import evaluate_scores
from rankgrad.eval.nearest import neighbours
from rankgrad.eval.protocols import PROTOCOLS, describe_protocols
from rankgrad.eval.result import Protocol, Result
from rankgrad.eval.revisited import revisited
from rankgrad.eval.sharded import evaluate_sharded

__all__ = [
    "PROTOCOLS",
    "Protocol",
    "Result",
    "describe_protocols",
    "evaluate",
    "evaluate_scores",
    "evaluate_sharded",
    "evaluate_table",
    "expected_memory",
    "neighbours",
    "revisited",
]
