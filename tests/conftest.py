"""What all tests share."""

import os

import torch

# Read when a kernel is decorated, so it is set before any test can import one. On a GPU the same tests run compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
