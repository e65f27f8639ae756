"""Files to checked tables to decoded images to batches of indices."""
