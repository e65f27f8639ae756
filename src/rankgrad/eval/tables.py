"""`evaluate_table`: embeddings of the rows of a table, which knows its labels, queries and gallery."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.eval.embedding_blocks import Array, Index
from rankgrad.eval.evaluation import evaluate
from rankgrad.eval.result import Protocol, Result
from rankgrad.eval.revisited import revisited

CALLER = "evaluate_table"


def evaluate_table(embeddings: Array, table: Any, *, protocol: str | Protocol | None = None, **options: Any) -> Result:
    """`evaluate`, or `revisited`, for the rows of a table, whose row numbers the result has for queries and neighbours.

    Args:
        embeddings: [N, d] one for each row of the table.
        table: anything with `labels`, -1 for a row of no class, and where it has them `categories`, `is_query` and
            `is_gallery` (without both every row is a query and a candidate), and `ground_truth` with `easy`, `hard` and `junk`.
        protocol: by default "roxford" with a ground truth, "query-gallery" where the table marks queries, else "all-vs-all".
        options: see `evaluate` and `revisited`.
    """
    labels = np.asarray(table.labels)
    if len(embeddings) != len(labels):
        raise ValueError(f"{CALLER}: embeddings must be one per row of the table, {len(labels)}, got {len(embeddings)}")
    labels = without_classless(labels)
    categories = getattr(table, "categories", None)
    marks = [getattr(table, name, None) for name in ("is_query", "is_gallery")]
    truth: Any = getattr(table, "ground_truth", None)
    name = protocol.name if isinstance(protocol, Protocol) else protocol or ("roxford" if truth is not None else None)
    if name is not None and name.startswith("roxford") and truth is None:
        raise ValueError(f"{CALLER}: {name} needs a table with a ground truth of easy, hard and junk images")
    if marks[0] is None and marks[1] is None:
        return evaluate(embeddings, labels, protocol=name, categories=categories, **options)
    queries, gallery = (np.arange(len(labels)) if mark is None else np.flatnonzero(mark) for mark in marks)
    if not len(queries) or not len(gallery):
        raise ValueError(f"{CALLER}: queries and a gallery are wanted, the table marks {len(queries)} and {len(gallery)} rows")
    asking, asked = _at(embeddings, queries), _at(embeddings, gallery)
    if name is not None and name.startswith("roxford"):
        result = revisited(asking, asked, truth.easy, truth.hard, truth.junk, protocol=name, **options)
    else:
        place = np.full(len(labels), -1)
        place[gallery] = np.arange(len(gallery))
        if options.get("category_gain") is not None and categories is not None:
            options["ref_categories"] = np.asarray(categories)[gallery]
        result = evaluate(
            asking,
            labels[queries],
            asked,
            labels[gallery],
            protocol=name,
            categories=None if categories is None else np.asarray(categories)[queries],
            self_index=place[queries],
            **options,
        )
    near = result.neighbours
    # a distractor of `revisited` comes after all rows of the table
    rows = np.concatenate((gallery, np.arange(len(options.get("distractors", ()))) + len(labels)))
    return replace(
        result,
        query_index=queries[result.query_index],
        neighbours=None if near is None else (rows[near[0]], near[1]),
    )


def without_classless(labels: Index) -> Index:
    """Labels with a class of its own for every row of none: nothing is relevant to it, and it to nothing."""
    alone = labels == -1
    return np.where(alone, labels.max(initial=0) + np.cumsum(alone), labels)


def _at(embeddings: Array, index: Index) -> Array:
    if len(index) == len(embeddings):
        return embeddings  # a memmap stays one
    return embeddings[torch.from_numpy(index).to(embeddings.device)] if isinstance(embeddings, Tensor) else embeddings[index]
