"""Objectives that know their own derivative, against autograd in float64."""

import pytest
import torch

import rankgrad as rg
from rankgrad.ops.autograd import PositiveScores

kernels = pytest.importorskip("rankgrad.ops.triton.objectives")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ranks_of(num_relevant, width):
    """Ranks of queries with so many positives, padded to `width`; one of them is perfect."""
    draws = torch.Generator().manual_seed(width)
    num_relevant = torch.tensor(num_relevant)
    valid = torch.arange(width) < num_relevant[:, None]
    among = torch.rand(valid.shape, generator=draws).argsort(dim=1) + 1.0
    rank = among + torch.randint(0, 30, valid.shape, generator=draws) + 0.25
    rank[0] = among[0]
    rank = torch.where(valid, rank, 1).to(DEVICE)
    positives = PositiveScores(
        *(rank, valid.to(DEVICE), None, num_relevant.to(DEVICE)),
        list_length=torch.full_like(num_relevant, 1000, device=DEVICE),
        rank_dtype=torch.float32,
    )
    return positives.item_ranks(rank, torch.where(valid, among, 1).to(DEVICE))


@pytest.mark.parametrize(
    "objective",
    [rg.RecallAtK((1, 2, 4, 8, 16)), rg.RecallAtK((3,), tau=0.3), rg.RecallAtK((5, 1000), tau=2.0), rg.AveragePrecision()],
    ids=str,
)
@pytest.mark.parametrize("by", [kernels, None], ids=["kernels", "torch"])
@pytest.mark.parametrize(("num_relevant", "width"), [([3, 0, 1, 2, 3], 3), ([1] * 9, 1), ([40, 5, 0, 37], 40)])
def test_value_and_derivatives_are_those_of_autograd(objective, by, num_relevant, width):
    by_mass = isinstance(objective, rg.AveragePrecision)
    ranks, fields = ranks_of(num_relevant, width), ("rank", "positive_rank", "mass", "gain")[: 4 if by_mass else 2]
    losses, *found = objective.with_gradient(ranks, fields, by)
    wide = type(ranks)(**{name: None if value is None else value.double() for name, value in vars(ranks).items()})
    wide = wide.detached(fields)
    expected = torch.where(wide.num_relevant > 0, objective(wide), 0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    for derivative, of_autograd in zip(found, wide.gradients(expected, fields), strict=True):
        torch.testing.assert_close(derivative.double(), of_autograd, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", [rg.RecallAtK(range(1, 40)), rg.RecallAtK((1, 2**30)), rg.AveragePrecision(k=5)], ids=str)
def test_what_has_no_derivative_of_its_own_is_left_to_autograd(objective):
    assert objective.with_gradient(ranks_of([3, 2], 3), ("rank",), kernels) is None


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize("objective", [rg.RecallAtK((1, 2)), rg.AveragePrecision()], ids=str)
def test_a_subclass_that_overrides_the_loss_is_left_to_autograd(objective, backend):
    class Doubled(type(objective)):
        def __call__(self, ranks):
            return 2 * super().__call__(ranks)

    class Renamed(type(objective)):
        pass

    results = []
    for kind in (type(objective), Renamed, Doubled):
        embeddings = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
        loss = rg.RankLoss(rg.Sigmoid(0.1), kind(**vars(objective)), backend=backend)
        value = loss(embeddings, torch.arange(6, device=DEVICE) % 2)
        value.backward()
        results.append(torch.cat((value.detach()[None], embeddings.grad.flatten())))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], 2 * results[0])


def test_entries_of_any_mass_are_left_to_autograd():
    assert rg.RecallAtK((1, 2)).with_gradient(ranks_of([3, 2], 3), ("rank", "mass"), kernels) is None
