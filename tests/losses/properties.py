"""Facts about the losses, each as a check that raises AssertionError on a loss for which it does not hold.

The checks take a loss, or a function that makes one, with the two doors of a rankgrad loss:
`loss(embeddings, labels)` and `loss.from_scores(scores, relevance)`.
"""

import math
from collections.abc import Callable

import oracle
import torch
from torch import Tensor


def close(got: Tensor, wanted, tolerance: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    assert got.shape == wanted.shape, f"{got.shape} is not {wanted.shape}"
    error = (got.detach().double() - wanted).abs().max().item()
    assert error <= tolerance, f"off by {error:.3e}: {got.detach()} is not {wanted}"


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perfect_list(positives: int, negatives: int = 40) -> tuple[Tensor, Tensor]:
    """Relevant first, all scores one apart: a hundred temperatures of 0.01."""
    scores = torch.arange(positives + negatives, 0, -1, dtype=torch.float64)
    return scores, torch.arange(positives + negatives) < positives


def random_list(n: int, positives: int, seed: int) -> tuple[Tensor, Tensor]:
    """Distinct scores, at least 0.01 apart, within (-1, 1)."""
    scores = torch.linspace(-0.9, 0.9, n, dtype=torch.float64)[torch.randperm(n, generator=rng(seed))]
    scores = scores + 0.2 / n * torch.rand(n, generator=rng(seed + 1), dtype=torch.float64)
    return scores, torch.randperm(n, generator=rng(seed + 2)) < positives


def unit_batch(sizes: tuple[int, ...], seed: int, dim: int = 4) -> tuple[Tensor, Tensor]:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=rng(seed))]
    points = torch.randn(len(labels), dim, generator=rng(seed + 1), dtype=torch.float64)
    return points / points.norm(dim=1, keepdim=True), labels


FLOORS = [
    (3, (1, 2, 4, 8, 16), 0.102081),
    (1, (1, 2, 4, 8, 16), 0.163456),
    (9, (1, 2, 4, 8, 16), 0.078903),
    (9, (1, 2, 4, 8, 12, 16, 20, 24, 28, 32), 0.040296),
    (3, (1,), 0.111856),
    (3, (2,), 0.25),
    (3, (4,), 0.14519),
    (3, (8,), 0.003359),
    (3, (16,), 1e-6),
]


def check_zero_loss_floors(make: Callable) -> None:
    """A perfect ranking does not reach zero, because an item at rank k counts one half within k."""
    for positives, ks, floor in FLOORS:
        close(make(ks).from_scores(*perfect_list(positives)), floor, tolerance=6e-7)


def check_published_convention(make: Callable) -> None:
    """make(query_in_database): the query on top of its own list raises every rank by one, to a floor of 0.2851."""
    angles = torch.tensor([0.0, 0.1, 0.25, 0.47], dtype=torch.float64)
    angles = torch.cat([angles, angles + 2.5])
    x, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    close(make(False)(x, labels), 0.102081, tolerance=6e-7)
    close(make(True)(x, labels), 0.2851, tolerance=6e-5)
    x, labels = unit_batch((1, 3, 4), seed=31)
    lists = oracle.embedding_lists(x, labels, query_in_database=True)
    objective = oracle.recall_at_k((1, 2, 4, 8, 16))
    close(make(True)(x, labels), oracle.rank_loss(lists, oracle.Sigmoid(1e-4), objective))


def check_fastap_centres(make: Callable) -> None:
    """Ten bins have eleven centres, 0.2 apart in the cosine (0.4 in the squared distance)."""
    relevance = torch.tensor([True, False])
    loss = make(10)

    def at(relevant: float, irrelevant: float) -> Tensor:
        return loss.from_scores(torch.tensor([relevant, irrelevant], dtype=torch.float64), relevance)

    for j in range(10):
        centre, below = 1 - 0.2 * j, 1 - 0.2 * (j + 1)
        close(at(centre, below), 0.0)  # neighbours do not see each other
        close(at(centre, centre), 0.5)
        close(at(centre, (centre + below) / 2), 1 / 3)  # half of the irrelevant item in the relevant one's bin
    close(at(-1.0, -1.0), 0.5)


def fastap_gradient(x: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Supplement eq. 17: 2/M * (F+ B+ + B+ F+ + F- B- + B- F-) X, for the loss 1 - FastAP on unit rows."""
    m, width = len(x), 4 / bins
    offset = (2 - 2 * x @ x.T)[:, :, None] - torch.arange(bins + 1, dtype=torch.float64) * width
    pulse, slope = (1 - offset.abs() / width).clamp(min=0), -offset.sign() / width * (offset.abs() < width)
    other = ~torch.eye(m, dtype=torch.bool)
    total = torch.zeros(m, m, dtype=torch.float64)
    same = labels[:, None] == labels
    h_pos, h_neg = ((pulse * mask[:, :, None]).sum(dim=1) for mask in (same & other, ~same))
    pos, neg = h_pos.cumsum(dim=1), h_neg.cumsum(dim=1)
    seen = torch.where(pos + neg > 0, pos + neg, torch.ones_like(pos))
    later = (h_pos * neg / seen**2).flip(1).cumsum(dim=1).flip(1) - h_pos * neg / seen**2
    d_pos = (pos * seen + h_pos * neg) / seen**2 + later
    d_neg = -(h_pos * pos / seen**2).flip(1).cumsum(dim=1).flip(1)
    for d, mask in ((d_pos, same & other), (d_neg, ~same)):
        per_pair = (d[:, None, :] / h_pos.sum(dim=1)[:, None, None] * slope).sum(dim=2) * mask
        total += per_pair + per_pair.T
    return 2 / m * total @ x


def check_fastap_gradient(make: Callable) -> None:
    """make(num_bins) on unnormalised input: the derivative, 2/M included, times the incoming gradient."""
    for bins in (5, 10):
        x, labels = unit_batch((2, 3, 5), seed=bins)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(3.7 * make(bins)(x, labels), x)
        close(gradient, 3.7 * fastap_gradient(x.detach(), labels, bins))
        direction = torch.randn(x.shape, generator=rng(3), dtype=torch.float64)
        step = 1e-6 * direction
        with torch.no_grad():
            difference = (make(bins)(x + step, labels) - make(bins)(x - step, labels)) / 2e-6
        close((gradient * direction).sum(), 3.7 * difference, tolerance=1e-6)


def check_fastap_all_tied(make: Callable) -> None:
    """With nothing to tell items apart FastAP is the share of relevant ones: the loss is 1 - P/(N-1)."""
    for per_class, classes in ((2, 5), (3, 4), (6, 2)):
        n = per_class * classes
        x = torch.eye(3, dtype=torch.float64)[:1].repeat(n, 1) * 2.0
        labels = torch.arange(n) % classes
        close(make(10)(x, labels), 1 - (per_class - 1) / (n - 1))


def check_fastap_many_bins(make: Callable) -> None:
    """Many bins come near average precision from above but do not meet it: an item lies in two bins.

    The item with p - 1 relevant and r - 1 of all items before it has f of its mass at the later centre:
    its precision is (1 - f) (p - f) / (r - f) + f p / r, where p / r is exact.
    """
    scores, relevance = random_list(30, 6, seed=5)
    order = scores.argsort(descending=True)
    hits = relevance[order].nonzero().flatten().double() + 1
    p = torch.arange(1, 7, dtype=torch.float64)
    exact = 1 - (p / hits).mean()
    losses = {}
    for bins in (10, 1000, 100_000):
        f = (1 - scores[order][relevance[order]]) * bins / 2 % 1
        limit = 1 - ((1 - f) * (p - f) / (hits - f) + f * p / hits).mean()
        losses[bins] = make(bins).from_scores(scores, relevance)
        if bins > 10:
            close(losses[bins], limit, tolerance=1e-7)
            assert exact + 1e-4 < losses[bins] < exact + 0.05
    assert (losses[1000] - exact).abs() < (losses[10] - exact).abs() / 2


def check_blackbox_lists(make: Callable) -> None:
    """make(lam): a list's gradient sums to 0, has entries in multiples of 1/(lam n), and is not zero throughout."""
    moved = 0
    for lam, n in ((0.5, 20), (4.0, 33)):
        rows = [random_list(n, 4, seed=seed) for seed in range(6)]
        scores = torch.stack([s for s, _ in rows]).requires_grad_()
        loss = make(lam).from_scores(scores, torch.stack([r for _, r in rows]))
        (gradient,) = torch.autograd.grad(loss, scores)
        close(gradient.sum(dim=1), torch.zeros(len(rows)))
        steps = gradient * lam * n
        close(steps, steps.round())
        moved += int(steps.round().abs().sum())
    assert moved > 20, f"the gradients moved {moved} places in all"


def check_blackbox_is_algorithm_1(make: Callable) -> None:
    """make(lam): equals two full rankings for the mean over lists, loss LogRecall."""
    rows = [random_list(25, 5, seed=seed) for seed in range(4)]
    scores = torch.stack([s for s, _ in rows]).requires_grad_()
    relevance = torch.stack([r for _, r in rows])
    (gradient,) = torch.autograd.grad(make(2.7183).from_scores(scores, relevance), scores)
    lists, wanted = oracle.score_lists(scores, relevance), torch.zeros_like(scores)
    for q, (row, gains) in enumerate(lists):
        before = (row[None, :] > row[:, None]).sum(dim=1).double()
        ahead = ((row[None, :] > row[:, None]) & ~relevance[q]).sum(dim=1)
        g = relevance[q] / (1 + ahead.double()) / gains.sum() / len(lists)
        pushed = row + 2.7183 * 25 * g
        after = (pushed[None, :] > pushed[:, None]).sum(dim=1).double()
        wanted[q] = ((after - before) / (2.7183 * 25)).detach()
    assert wanted.abs().max() > 0
    close(gradient, wanted.detach())


def check_ties_count_against(loss) -> None:
    """Loss of reciprocal rank under the exact ranker."""
    for tied in (0, 1, 4):
        scores = torch.tensor([0.5] * (1 + tied) + [0.1], dtype=torch.float64)
        relevance = torch.arange(2 + tied) == 0
        close(loss.from_scores(scores, relevance), 1 - 1 / (1 + tied))


def check_blackbox_ties(loss) -> None:
    """Average precision on a proper ranking: irrelevant first, then relevant one after the other."""
    scores, relevance = torch.zeros(3, dtype=torch.float64), torch.tensor([True, False, True])
    close(loss.from_scores(scores, relevance), 1 - (1 / 2 + 2 / 3) / 2)


def check_query_is_not_in_its_list(loss) -> None:
    """Average precision: each query of class 0 has one relevant item, behind the stranger."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    close(loss(x, torch.tensor([0, 0, 1])), 0.5)


def loss_at(k: int, scores: Tensor, relevance: Tensor) -> float:
    """RaMBO eq. 16-18: the share of relevant items with at least k irrelevant ones ahead."""
    irrelevant = scores[~relevance]
    ahead = [(irrelevant >= s).sum().item() for s in scores[relevance]]
    return sum(r >= k for r in ahead) / len(ahead)


def check_is_weighted_sum_over_k(loss, weight: Callable[[int], float]) -> None:
    for seed in range(5):
        scores, relevance = random_list(17, 3 + seed, seed=seed)
        wanted = sum(weight(k) * loss_at(k, scores, relevance) for k in range(1, 18))
        close(loss.from_scores(scores, relevance), wanted)


def log_weight(k: int) -> float:
    return math.log(1 + 1 / k)


def loglog_weight(k: int) -> float:
    return math.log1p(math.log1p(k)) - math.log1p(math.log1p(k - 1))


def check_scales_with_the_loss(loss) -> None:
    """A loss times 1000 has gradients times 1000, and they are not zero."""
    x, labels = unit_batch((3, 4, 5, 4), seed=11)
    x.requires_grad_()
    (plain,) = torch.autograd.grad(loss(x, labels), x)
    (scaled,) = torch.autograd.grad(1000 * loss(x, labels), x)
    assert plain.abs().max() > 1e-6
    close(scaled / 1000, plain, tolerance=1e-12)


def check_tends_to_exact(loss, objective: oracle.Objective) -> None:
    """`loss` has a temperature of 1e-4, a hundredth of the smallest gap between scores."""
    for seed in range(4):
        scores, relevance = random_list(20, 2 + 2 * seed, seed=40 + seed)
        lists = oracle.score_lists(scores, relevance)
        close(loss.from_scores(scores, relevance), oracle.rank_loss(lists, oracle.Exact(), objective))


def check_gradient_is_the_derivative(loss) -> None:
    x, labels = unit_batch((1, 2, 4), seed=21)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda e: loss(e, labels), x, raise_exception=False)
    rows = [random_list(9, p, seed=60 + p) for p in (1, 4)]
    scores = torch.stack([s for s, _ in rows]).requires_grad_()
    relevance = torch.stack([r for _, r in rows])
    assert torch.autograd.gradcheck(lambda s: loss.from_scores(s, relevance), scores, raise_exception=False)
