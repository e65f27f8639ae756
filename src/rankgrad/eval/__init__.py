"""Embeddings -> ranks of relevant items -> metrics under a named protocol."""

from rankgrad.eval.evaluation import evaluate, expected_memory
from rankgrad.eval.nearest import neighbours
from rankgrad.eval.protocols import PROTOCOLS, describe_protocols
from rankgrad.eval.result import Protocol, Result
from rankgrad.eval.revisited import revisited
from rankgrad.eval.sharded import evaluate_divided
from rankgrad.eval.tables import evaluate_table

__all__ = [
    "PROTOCOLS",
    "Protocol",
    "Result",
    "describe_protocols",
    "evaluate",
    "evaluate_divided",
    "evaluate_table",
    "expected_memory",
    "neighbours",
    "revisited",
]
