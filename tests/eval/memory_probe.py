"""What an evaluation takes of memory, measured in a process of its own, which imports this file by its name."""

import torch
from benchmarks.measure import peak_memory
from benchmarks.synthetic import ragged_batch

from rankgrad.eval import evaluate


def announced_and_taken(count, class_sizes, memory_limit):
    """For every most size of a class the bytes announced, the bytes taken and those of all scores at once."""
    torch.set_num_threads(1)
    found = []
    for most in class_sizes:
        batch = ragged_batch(count, 64, most)
        evaluate(batch[0][:600], batch[1][:600])  # loads what is loaded once
        results = []
        taken = peak_memory(
            lambda batch=batch, results=results: results.append(evaluate(*batch, memory_limit=memory_limit)),
            torch.device("cpu"),
        )
        found.append((results[0].memory, taken, count * count * 4))
    return found
