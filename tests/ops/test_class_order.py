"""The class order of a small batch by kernels is that of the sorts, to the last item."""

import pytest
import torch

from rankgrad.ops.labels import Labels

class_order = pytest.importorskip("rankgrad.ops.triton.class_order")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSORS = ("query_order", "start", "stop", "class_start", "self_column", "num_relevant", "list_length")


def batches():
    draws = torch.Generator().manual_seed(0)
    yield "one item", torch.tensor([7])
    yield "one class", torch.full((40,), -3)
    yield "singletons", torch.randperm(70, generator=draws) - 30
    yield "ragged", torch.randint(0, 60, (300,), generator=draws) ** 2
    yield "far apart", torch.tensor([2**62, -(2**62), 0, 2**32, 2**62, 0, -1, 2**62, 2**32])
    yield "strided", torch.randint(0, 9, (2, 65), generator=draws).t()[:, 1]


@pytest.mark.parametrize(("name", "labels"), list(batches()), ids=[name for name, _ in batches()])
@pytest.mark.parametrize("rank_self", [False, True])
def test_kernels_and_sorts_agree(name, labels, rank_self):
    given = Labels(labels.to(DEVICE), rank_self=rank_self)
    compared, expected = given.build(captured=True), given.build()
    for tensor in TENSORS:
        assert torch.equal(getattr(compared, tensor), getattr(expected, tensor)), tensor


@pytest.mark.parametrize(("most", "launches"), [(40, 1), (39, 0)])
def test_larger_batches_and_references_are_sorted(most, launches, monkeypatch):
    made = []
    order = class_order.class_order
    monkeypatch.setattr(class_order, "MOST_ITEMS", most)
    monkeypatch.setattr(class_order, "class_order", lambda labels: (made.append(labels), order(labels))[1])
    labels = torch.arange(40, device=DEVICE) // 3
    Labels(labels).build()
    Labels(labels, labels[:5]).build(captured=True)
    assert not made
    Labels(labels).build(captured=True)
    assert len(made) == launches
