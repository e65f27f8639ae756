"""The embedding door on a GPU: tiles of scores that never leave the chip."""
