"""The training loop for any model and loss: large batches, checkpoints, journal, diagnostics, several processes."""
