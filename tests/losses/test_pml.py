"""FastAPLoss against pytorch-metric-learning's, value and gradient, where that one is defined.

Its reducer drops queries without relevant items, as ours does. Where no query has any it returns a zero that
the graph does not reach, so that case is left to our own tests.
"""

import pytest
import torch

import rankgrad

pml = pytest.importorskip("pytorch_metric_learning.losses")


def batch(n: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random labels; the last two items stand alone in their classes."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=rng)
    labels[-2:] = torch.tensor([classes, classes + 1])
    return torch.randn(n, 6, generator=rng, dtype=torch.float64) * 3, labels


@pytest.mark.parametrize("num_bins", [5, 10])
@pytest.mark.parametrize(("n", "classes"), [(8, 2), (24, 5), (60, 12)])
def test_fastap(num_bins, n, classes):
    for seed in range(3):
        x, labels = batch(n, classes, seed)
        ours_in, theirs_in = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours = rankgrad.FastAPLoss(num_bins)(ours_in, labels)
        theirs = pml.FastAPLoss(num_bins)(theirs_in, labels)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        (got,), (wanted,) = torch.autograd.grad(2.5 * ours, ours_in), torch.autograd.grad(2.5 * theirs, theirs_in)
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
