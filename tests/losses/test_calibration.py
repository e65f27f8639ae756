"""A term beside a rank loss: values by definition, gradients to embeddings and proxies, bad input."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import rankgrad as rg


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(10, 6, generator=generator, dtype=torch.float64), torch.tensor([7, 3, 12, 3, 7, 12, 7, 3, 3, 12])


def test_the_sum_and_its_gradients():
    x, labels = batch()
    term = rg.ProxySoftmax([12, 3, 7], 6).double()
    loss = rg.CalibratedRankLoss(rg.SupAPLoss(tau=0.1), term, weight=0.3)
    ours = x.clone().requires_grad_()
    value = loss(ours, labels)
    (value * 2.5).backward()

    plain, proxies = x.clone().requires_grad_(), term.proxies.detach().clone().requires_grad_()
    cosines = F.normalize(plain) @ F.normalize(proxies).t()
    numbers = torch.tensor([{3: 0, 7: 1, 12: 2}[label] for label in labels.tolist()])
    softmax = -(cosines / 0.05).log_softmax(dim=1)[torch.arange(10), numbers].mean()
    wanted = 0.7 * rg.SupAPLoss(tau=0.1)(plain, labels) + 0.3 * softmax
    (wanted * 2.5).backward()
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(ours.grad, plain.grad)
    torch.testing.assert_close(term.proxies.grad, proxies.grad)
    assert loss.used_queries == 10


def test_an_item_without_a_proxy_leaves_the_mean():
    x, labels = batch()
    term = rg.ProxySoftmax([3, 7, 12], 6).double()
    longer = torch.cat((x, torch.ones(2, 6, dtype=x.dtype)))
    torch.testing.assert_close(term(longer, torch.cat((labels, torch.tensor([-1, 90])))), term(x, labels))
    assert term(x, torch.full((10,), -1)).isnan()


def test_every_proxy_attracts_its_class_and_repels_the_others():
    x, labels = batch()
    term = rg.ProxyAnchor([3, 7, 12, 90], 6, margin=0.1, alpha=16).double()
    unit, proxies = F.normalize(x.detach(), dim=1), F.normalize(term.proxies.detach(), dim=1)
    attracted, repelled = [], []
    for proxy, label in zip(proxies, (3, 7, 12, 90), strict=True):
        cosines = [float(row @ proxy) for row in unit]
        own = [math.exp(-16 * (c - 0.1)) for c, found in zip(cosines, labels.tolist(), strict=True) if found == label]
        others = [math.exp(16 * (c + 0.1)) for c, found in zip(cosines, labels.tolist(), strict=True) if found != label]
        attracted += [math.log1p(sum(own))] if own else []
        repelled.append(math.log1p(sum(others)))
    wanted = sum(attracted) / len(attracted) + sum(repelled) / 4
    assert len(attracted) == 3
    assert float(term(x, labels).detach()) == pytest.approx(wanted, rel=1e-12)
    # a distractor is neither attracted nor repelled
    longer = torch.cat((x, torch.ones(2, 6, dtype=x.dtype)))
    torch.testing.assert_close(term(longer, torch.cat((labels, torch.tensor([-1, 8])))), term(x, labels))
    assert term(x, torch.full((10,), -1)).isnan()


def test_proxy_anchor_agrees_with_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    theirs = losses.ProxyAnchorLoss(num_classes=3, embedding_size=6, margin=0.2, alpha=24).double()
    ours = rg.ProxyAnchor([3, 7, 12], 6, margin=0.2, alpha=24).double()
    with torch.no_grad():
        ours.proxies.copy_(theirs.proxies)
    x, labels = batch()
    gradients = []
    for term, given in ((ours, labels), (theirs, torch.searchsorted(torch.tensor([3, 7, 12]), labels))):
        leaf = x.detach().clone().requires_grad_()
        value = term(leaf, given)
        value.backward()
        gradients.append((value.detach(), leaf.grad, term.proxies.grad))
    torch.testing.assert_close(*gradients)


def test_pairs_are_charged_for_their_distance_to_the_margins():
    angles = torch.tensor([0.0, 0.2, 1.0, 3.0], dtype=torch.float64)
    x, labels = torch.stack((angles.cos(), angles.sin()), dim=1), torch.tensor([0, 0, 0, 1])
    cosine = (angles[:, None] - angles).cos()
    alpha, beta = 0.9, 0.3
    costs = []
    for q in range(4):
        relevant = [max(0, alpha - cosine[q, j]) for j in range(4) if labels[j] == labels[q] and j != q]
        others = [max(0, cosine[q, j] - beta) for j in range(4) if labels[j] != labels[q]]
        costs.append(sum(float(sum(part)) / len(part) for part in (relevant, others) if part))
    assert float(rg.PairCalibration(alpha, beta)(x, labels)) == pytest.approx(sum(costs) / 4, abs=1e-12)


@pytest.mark.parametrize("around", [rg.SiMix, lambda loss: rg.EmbeddingMemory(loss, 2)], ids=["simix", "memory"])
def test_virtual_examples_and_past_batches_enter_the_rank_loss_only(around):
    term = rg.ProxySoftmax([3, 7, 12], 6).double()
    loss = rg.CalibratedRankLoss(around(rg.SmoothAPLoss(0.1)), term, weight=0.2)
    inner = copy.deepcopy(loss.loss)
    for seed in range(2):
        x, labels = batch(seed)
        torch.manual_seed(seed)
        value = loss(x, labels)
        torch.manual_seed(seed)
        torch.testing.assert_close(value, 0.8 * inner(x, labels) + 0.2 * term(x, labels))
    assert set(loss.state_dict()) >= {"term.proxies"}


def test_in_float32_under_autocast():
    x, labels = batch()
    loss = rg.CalibratedRankLoss(rg.SmoothAPLoss(), rg.ProxySoftmax([3, 7, 12], 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(x.float(), labels)
    torch.testing.assert_close(value, loss(x.float(), labels))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rg.CalibratedRankLoss(F.mse_loss, rg.PairCalibration()), TypeError, "loss must be a RankLoss, SiMix"),
        (lambda: rg.CalibratedRankLoss(rg.SmoothAPLoss(), 3), TypeError, "term must be a function of embeddings and labels"),
        (lambda: rg.CalibratedRankLoss(rg.SmoothAPLoss(), rg.PairCalibration(), 1.5), ValueError, "weight.*1.5"),
        (lambda: rg.CalibratedRankLoss(rg.SmoothAPLoss(reduction="none"), rg.PairCalibration()), ValueError, "reduction"),
        (lambda: rg.ProxySoftmax(0, 4), ValueError, "classes"),
        (lambda: rg.ProxySoftmax([1, 1, 2], 4), ValueError, "different integer labels"),
        (lambda: rg.ProxySoftmax(3, 4, temperature=0.0), ValueError, "temperature"),
        (lambda: rg.ProxyAnchor(3, 4, margin=-0.1), ValueError, "margin"),
        (lambda: rg.ProxyAnchor(3, 4, alpha=0.0), ValueError, "alpha"),
        (lambda: rg.ProxySoftmax(3, 4)(torch.ones(2, 5), torch.tensor([0, 1])), ValueError, "the 4 dimensions.*got 5"),
        (lambda: rg.PairCalibration(alpha=1.2), ValueError, "alpha.*1.2"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
