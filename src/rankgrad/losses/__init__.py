"""Rankers x objectives, the papers' losses as presets of that product, and what wraps them."""
