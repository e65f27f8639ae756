"""One loop that is handed a model and a loss: large batches, checkpoints, journal, diagnostics, plan."""
