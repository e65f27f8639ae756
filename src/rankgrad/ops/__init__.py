"""Ranks of relevant items: what they mean, how they are counted, where the scores come from."""
