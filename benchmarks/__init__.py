"""Benchmarks: time and peak memory of the losses beside the formulations a user would otherwise write."""
