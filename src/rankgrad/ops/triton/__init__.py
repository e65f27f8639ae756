"""Triton kernels: tiles of scores that never leave the chip."""
