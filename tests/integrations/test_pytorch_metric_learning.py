"""Rank losses behind the interface of pytorch-metric-learning."""

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices

import rankgrad as rg
from rankgrad.integrations.pytorch_metric_learning import pml

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])  # the last one has nothing to find


def embeddings(items=9, seed=0):
    return torch.randn(items, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("loss", [rg.SmoothAPLoss(), rg.FastAPLoss(), rg.RamboAPLoss()], ids=["smooth", "fastap", "rambo"])
def test_the_mean_reducer_gives_our_mean(loss):
    emb = embeddings()
    torch.testing.assert_close(pml(loss)(emb, LABELS), loss(emb, LABELS))


@pytest.mark.parametrize("loss", [rg.RamboAPLoss(2.0), rg.RamboRecallLoss(), rg.SupAPLoss(0.1)], ids=["ap", "recall", "sup"])
def test_the_mean_reducer_gives_our_gradient(loss):
    """The perturbation of a blackbox loss must not depend on who takes the mean."""
    gradients = []
    for each in (loss, pml(loss)):
        emb = embeddings().requires_grad_()
        (2.5 * each(emb, LABELS)).backward()
        gradients.append(emb.grad)
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients)


def test_a_tuple_of_a_miner_given_to_a_rank_loss_is_explained():
    emb = embeddings()
    for mined in (miners.BatchHardMiner()(emb, LABELS), get_all_pairs_indices(LABELS)):
        with pytest.raises(TypeError, match=r"a miner of pytorch-metric-learning returns.*needs no miner.*pml\(loss\)"):
            rg.SmoothAPLoss()(emb, LABELS, mined)


def test_references_are_ranked_for_the_queries():
    loss, emb, ref = rg.SmoothAPLoss(), embeddings(), embeddings(12, seed=1)
    ref_labels = torch.arange(12) % 3
    found = pml(loss)(emb, LABELS, ref_emb=ref, ref_labels=ref_labels)
    torch.testing.assert_close(found, loss(emb, LABELS, ref, ref_labels))


def test_all_pairs_as_a_tuple_change_nothing():
    loss, emb = rg.SmoothAPLoss(), embeddings()
    torch.testing.assert_close(pml(loss)(emb, LABELS, get_all_pairs_indices(LABELS)), loss(emb, LABELS))


def test_a_miner_selects_what_is_ranked():
    loss, emb = rg.SmoothAPLoss(), embeddings()
    mined = miners.BatchHardMiner()(emb, LABELS)
    a, p, n = mined
    relevant, ranked = (torch.zeros(9, 9, dtype=torch.bool) for _ in range(2))
    relevant[a, p] = True
    ranked[a, p], ranked[a, n] = True, True
    unit = torch.nn.functional.normalize(emb)
    expected = loss.from_scores(unit @ unit.t(), relevant, candidates=ranked)
    torch.testing.assert_close(pml(loss)(emb, LABELS, mined), expected)
    assert not torch.isclose(expected, loss(emb, LABELS))


def test_reducers_see_one_element_for_every_query_with_something_to_find():
    emb = embeddings()
    found = pml(rg.SmoothAPLoss(), reducer=reducers.DoNothingReducer())(emb, LABELS)["loss"]
    assert found["indices"].tolist() == list(range(8))
    torch.testing.assert_close(found["losses"], rg.SmoothAPLoss(reduction="none")(emb, LABELS)[:8])


def test_the_loss_given_is_not_changed():
    loss = rg.SmoothAPLoss()
    pml(loss)(embeddings(), LABELS)
    assert loss.reduction == "mean"


def test_nothing_to_find_is_a_zero_loss():
    assert pml(rg.SmoothAPLoss())(embeddings(3), torch.arange(3)) == 0


def test_their_wrapper_takes_it_and_their_losses_are_refused():
    assert isinstance(DistributedLossWrapper(pml(rg.SmoothAPLoss())).loss, losses.BaseMetricLossFunction)
    with pytest.raises(TypeError, match=r"pml: loss must be a rank loss such as .*, got TripletMarginLoss"):
        pml(losses.TripletMarginLoss())


def test_a_distance_is_refused_and_not_ignored():
    with pytest.raises(TypeError, match="pml: a rank loss ranks by cosines"):
        pml(rg.SmoothAPLoss(), distance=distances.LpDistance())
