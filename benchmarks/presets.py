"""The losses with the papers' settings, which ours and every baseline of them share."""

from collections.abc import Callable

import torch

import rankgrad

KS = (1, 2, 4, 8, 16)
TAU_RANK = 0.01
TAU_CUT = 1.0
BINS = 10
RECALL_LAM, RECALL_MARGIN = 4.0, 0.02
AP_LAM, AP_MARGIN = 0.5, 0.0

PRESETS: dict[str, Callable[[str], torch.nn.Module]] = {
    "recall_at_k": lambda backend: rankgrad.RecallAtKLoss(ks=KS, tau_rank=TAU_RANK, tau_cut=TAU_CUT, backend=backend),
    "smooth_ap": lambda backend: rankgrad.SmoothAPLoss(tau=TAU_RANK, backend=backend),
    "fast_ap": lambda backend: rankgrad.FastAPLoss(num_bins=BINS, backend=backend),
    "rambo_recall": lambda backend: rankgrad.RamboRecallLoss(
        lam=RECALL_LAM, margin=RECALL_MARGIN, weighting="loglog", backend=backend
    ),
    "rambo_ap": lambda backend: rankgrad.RamboAPLoss(lam=AP_LAM, margin=AP_MARGIN, backend=backend),
}
"""Each loss by name, made for a backend."""
