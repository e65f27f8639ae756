"""`python -m rankgrad.cli`."""

from rankgrad.cli import run_as_module

run_as_module()
