"""What the loss does not show: exact metrics in the batch, queries and pairs that still have a gradient, and collapse."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# scores computed for a log entry, 16 MiB of float32; of a larger batch fewer queries are used
MOST_SCORES = 2**22
MOST_QUERIES = 2048
MOST_QUERIES_FOR_GRADIENTS = 512
MOST_ROWS_FOR_SPREAD = 1024

# share of the largest gradient of a pair below which a pair does not move the model
NOTICEABLE = 1e-3

# embeddings collapse when their spread is below this share of what it was at first, and either below this at all or in less
# than this share of the dimensions
OF_FIRST, COLLAPSED, FEW_DIMENSIONS = 0.2, 0.02, 0.1


def diagnose(embeddings: Tensor, labels: Tensor, loss: Any) -> dict[str, float]:
    """Numbers for a journal entry, from the embeddings of a batch; those of `loss.diagnose` where it has one.

    Returns:
        batch_R@1, batch_mAP: exact, each query against the rest of the batch; queries without relevant items are skipped.
        perfect: share of these queries whose relevant items all come first, so that they have no gradient left.
        pairs_with_gradient: share of (query, candidate) scores with a noticeable gradient, where the loss takes scores.
        spread: 1 - mean cosine between different images; 0 when all embeddings have collapsed into one.
        effective_rank: number of dimensions they span, exp of the entropy of their normalised singular values.
        skipped: queries without relevant items.
        tau: temperature of the ranker where it is learned or changes, by `changing_settings` of the loss or one inside it.
    """
    if hasattr(loss, "diagnose"):
        numbers: dict[str, float] = loss.diagnose(embeddings, labels)
        return numbers
    embeddings = unit_rows(embeddings)
    known = of_loss(labels, loss)  # before the loss is called again
    numbers = {**in_batch(embeddings, labels, loss), **spread(embeddings)}
    return numbers | {name: float(value) for name, value in known.items()}


def unit_rows(embeddings: Tensor) -> Tensor:
    """Embeddings of length 1 in float32."""
    return F.normalize(embeddings.detach().float(), dim=1)


def of_loss(labels: Tensor, loss: Any) -> dict[str, float | Tensor]:
    """The numbers of `diagnose` that the loss knows of its last call; does not synchronise."""
    numbers: dict[str, float | Tensor] = {"skipped": skipped_queries(labels, loss)}
    for module in loss.modules() if isinstance(loss, nn.Module) else ():
        changing = getattr(module, "changing_settings", None)
        numbers |= changing() if callable(changing) else {}
    return numbers


def in_batch(embeddings: Tensor, labels: Tensor, loss: Any) -> dict[str, float]:
    """The numbers of `diagnose` that need scores, from unit embeddings; calls the loss."""
    labels = labels.to(embeddings.device)
    numbers = batch_metrics(embeddings, labels)
    share = pairs_with_gradient(embeddings, labels, loss)
    return numbers if share is None else {**numbers, "pairs_with_gradient": share}


# a batch that moves as a whole leaves the irrelevant items in memory behind, which have no gradient
FROM_MEMORY = "Ranking against past batches makes this likely: try --memory 0. "


class CollapseDetector:
    """Notices that all embeddings fall together, from the numbers of `diagnose`."""

    def __init__(self) -> None:
        self.first: Mapping[str, float] | None = None
        self.reported = False

    def check(self, numbers: Mapping[str, float], loss: Any = None) -> str | None:
        """What to tell the user of a run with this loss, once; None while there is nothing to tell."""
        if "spread" not in numbers or self.reported:
            return None
        if self.first is None:
            self.first = {name: numbers[name] for name in ("spread", "effective_rank")}
        first, now = self.first["spread"], numbers["spread"]
        flat = numbers["effective_rank"] < FEW_DIMENSIONS * self.first["effective_rank"]
        if now >= OF_FIRST * first or not (now < COLLAPSED or flat):
            return None
        self.reported = True
        losses = loss.modules() if isinstance(loss, nn.Module) else ()  # a memory may be inside another loss
        has_memory = any(getattr(module, "past", None) for module in losses)
        return (
            f"all embeddings fall together: the mean cosine between images is {1 - now:.4f}, it was {1 - first:.4f} at first. "
            f"{FROM_MEMORY if has_memory else ''}"
            "Most often the learning rate is too high: lower --lr, add --warmup-steps, or from random weights --whiten"
        )


def batch_metrics(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Exact R@1, mAP and share of perfect queries of unit embeddings; an irrelevant item wins a tie."""
    scores, relevant = _lists(embeddings, labels, MOST_QUERIES)
    has_relevant = relevant.any(dim=1)
    scores, relevant = scores[has_relevant], relevant[has_relevant]
    if not len(scores):
        return {}
    irrelevant = scores.masked_fill(relevant, -torch.inf).sort(dim=1).values
    found = relevant.sum(dim=1)
    most = int(found.max())
    thresholds = scores.masked_fill(~relevant, -torch.inf).topk(most, dim=1).values
    ahead = scores.shape[1] - torch.searchsorted(irrelevant, thresholds)
    place = torch.arange(1, most + 1, device=scores.device)
    real = place <= found[:, None]
    precision = (place / (place + ahead)).masked_fill(~real, 0).sum(dim=1) / found
    perfect = (ahead.masked_fill(~real, 0) == 0).all(dim=1)
    first = (ahead[:, 0] == 0).float().mean()
    values = torch.stack((first, precision.mean(), perfect.float().mean())).tolist()
    return dict(zip(("batch_R@1", "batch_mAP", "perfect"), values, strict=True))


def pairs_with_gradient(embeddings: Tensor, labels: Tensor, loss: Any) -> float | None:
    """Share of scores with a noticeable gradient; None for a loss that does not take scores."""
    while not hasattr(loss, "from_scores") and isinstance(getattr(loss, "loss", None), nn.Module):
        loss = loss.loss  # a loss inside SiMix or a memory
    if not hasattr(loss, "from_scores"):
        return None
    scores, relevant = _lists(embeddings, labels, MOST_QUERIES_FOR_GRADIENTS)
    if not scores.numel():
        return None
    with torch.enable_grad():
        scores = scores.requires_grad_()
        (gradient,) = torch.autograd.grad(loss.from_scores(scores, relevant).sum(), scores)
    size = gradient.abs()
    return float((size > NOTICEABLE * size.max()).float().mean())


def spread(embeddings: Tensor) -> dict[str, float]:
    """Mean distance of unit embeddings, and the number of dimensions they span."""
    rows = embeddings[:MOST_ROWS_FOR_SPREAD].double()
    count = len(rows)
    if count < 2:
        return {}
    mean_cosine = (rows.sum(dim=0).square().sum() - rows.square().sum()) / (count * (count - 1))
    gram = rows.t() @ rows if rows.shape[1] <= count else rows @ rows.t()
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = values / values.sum()
    rank = torch.exp(-torch.special.xlogy(shares, shares).sum())
    return {"spread": 1 - float(mean_cosine), "effective_rank": float(rank)}


def skipped_queries(labels: Tensor, loss: Any) -> Tensor:
    """Queries of the last batch without relevant items, as the loss counted them if it did."""
    used = getattr(loss, "used_queries", None)
    # a wrapper that is not a memory adds queries to those of the batch and counts them too
    if used is not None and (hasattr(loss, "past") or not hasattr(loss, "loss")):
        return torch.as_tensor(len(labels) - used)
    ordered = labels.sort().values
    differs = torch.ones(len(labels) + 1, dtype=torch.bool, device=labels.device)
    differs[1:-1] = ordered[1:] != ordered[:-1]
    return (differs[1:] & differs[:-1]).sum()


def _lists(embeddings: Tensor, labels: Tensor, most_queries: int) -> tuple[Tensor, Tensor]:
    """Scores and relevance [Q, N - 1] of the first queries against all others of the batch."""
    items = len(embeddings)
    queries = max(1, min(items, most_queries, MOST_SCORES // items))
    scores = embeddings[:queries] @ embeddings.t()
    relevant = labels[:queries, None] == labels[None, :]
    # by their columns: a mask would synchronise
    column, query = (torch.arange(count, device=embeddings.device) for count in (items - 1, queries))
    others = column + (column >= query[:, None])
    return scores.gather(1, others), relevant.gather(1, others)
