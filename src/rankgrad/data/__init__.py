"""Files to checked tables to batches; here the built-in glyphs."""
