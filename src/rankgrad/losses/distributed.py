"""One loss of the batch that several processes hold together.

Process p holds the embeddings e_p. It gathers those of all, ranks its own queries only, and computes its shard L_p of the loss

    L = L_1 + ... + L_G          each the sum over the queries of p, divided by the queries of all processes

so work and memory of the scores are divided by G. Going back, process p has dL_p / de_q for every q; the sum of these over p is
dL / de_q and is sent to q, the owner. So every process holds the gradient of the whole loss with respect to its own embeddings,
and the gradient of parameters is the sum over processes of what each sends through its model:

    dL / dw = sum over q of (de_q / dw)^T dL / de_q

DistributedDataParallel and FSDP make the mean of that sum. For them dL / de_q is multiplied by G, which makes it the sum again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad._checks import check_labels, check_tensor, check_weights
from rankgrad.losses.calibration import CalibratedRankLoss
from rankgrad.losses.memory import EmbeddingMemory
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.simix import SiMix
from rankgrad.ops.relevance import Relevance, labels_or_relevance


class DistributedRankLoss(nn.Module):
    """`loss` of the batches of all processes as if they were one batch in one process, in the order of the ranks.

        loss = DistributedRankLoss(RecallAtKLoss())
        loss(ddp_model(images), labels).backward()      # images and labels of this process

    Value and gradient are those of one process, up to the order of sums, on every process: each ranks its own queries against
    the candidates of all. Processes may hold different numbers of items, and items whose positives are on other processes. Each
    process draws its own random numbers for a `Blackbox` with `margin_noise` and for random layers of the model; the virtual
    examples of `SiMix` are drawn by the first process for all. With one process, or without a process group, it is `loss`.

    In place of labels each process may give `Levels` of its items, or `Pairs` in rows of the whole batch: those of the first
    process come first, and a pair is given by one process, whichever.

    After a call `gathered` holds embeddings and labels of the whole batch, `used_queries` counts all processes' queries.

    Args:
        loss: a `RankLoss` with reduction "mean", a `SiMix`, an `EmbeddingMemory`, which then remembers whole batches, or a
            `CalibratedRankLoss` of one of these, whose term every process computes of the whole batch. The gradient of its
            parameters is then complete on every process, and need not be averaged.
        group: the processes, by default all.
        averaged: whether the gradients of parameters will be averaged over the processes, as DistributedDataParallel and FSDP
            do. False: the caller sums them; what arrives at the embeddings is then the gradient of the loss.
    """

    gathered: tuple[Tensor, Tensor | Relevance] | None

    def __init__(
        self,
        loss: RankLoss | SiMix | EmbeddingMemory | CalibratedRankLoss,
        group: "dist.ProcessGroup | None" = None,
        *,
        averaged: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(loss, (RankLoss, SiMix, EmbeddingMemory, CalibratedRankLoss)):
            raise TypeError(
                "DistributedRankLoss: loss must be a RankLoss, SiMix, EmbeddingMemory or CalibratedRankLoss, "
                f"got {type(loss).__name__}"
            )
        ranked = _inner(loss)
        ranked = ranked if isinstance(ranked, RankLoss) else ranked.loss
        if ranked.reduction != "mean":
            raise ValueError(f"DistributedRankLoss: loss must have reduction 'mean', got {ranked.reduction!r}")
        self.loss, self.group, self.averaged = loss, group, averaged
        if averaged:
            # each process finds its shard's part of the gradient of a learned tau, times the number of processes
            for parameter in ranked.parameters():
                parameter.register_hook(self._mean)
        self.gathered = None

    @property
    def used_queries(self) -> Tensor:
        return self.loss.used_queries

    def clear_graphs(self) -> None:
        """See `RankLoss.clear_graphs`."""
        self.loss.clear_graphs()

    def _mean(self, gradient: Tensor) -> Tensor:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            return gradient
        total = gradient.clone()
        dist.all_reduce(total, group=self.group)
        return total / dist.get_world_size(self.group)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | Relevance | None = None,
        *,
        relevance: Relevance | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Loss of the batch of all processes, from the embeddings [items, dimensions] and labels or `relevance` of this one.

        `weights` [items] of at least 0 weigh its queries in the mean over all processes; all processes give them, or none does.
        """
        labels = labels_or_relevance(labels, relevance, "DistributedRankLoss")
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            value: Tensor = self.loss(embeddings, labels, weights=weights)
            self.gathered = embeddings.detach(), labels
            return value
        shards = _Shards.of(embeddings, labels, weights, self.group)
        gathered: Tensor = _Gather.apply(embeddings, shards)
        # on the device of the embeddings, which is where the backend of the group can send from
        all_labels: Tensor | Relevance
        if isinstance(labels, Tensor):
            all_labels = shards.gather(labels.to(embeddings.device, torch.long))
        else:
            all_labels = labels.gathered(lambda rows: gather_ragged(rows.to(embeddings.device), self.group))
        all_weights = None if weights is None else shards.gather(weights.to(embeddings.device, torch.float64))
        factor = shards.size if self.averaged else 1
        whole: Tensor = _Sum.apply(self._shard_loss(gathered, all_labels, all_weights, shards), factor, self.group)
        inner = _inner(self.loss)
        if isinstance(inner, EmbeddingMemory):
            inner.remember(gathered, all_labels)
        self.gathered = gathered.detach(), all_labels
        return whole

    def _shard_loss(self, gathered: Tensor, labels: Tensor | Relevance, weights: Tensor | None, shards: "_Shards") -> Tensor:
        loss = _inner(self.loss)
        if isinstance(loss, SiMix):
            # all draw, so that generators which were alike stay so
            alpha = loss.draw(labels, gathered)
            dist.broadcast(alpha, 0 if self.group is None else dist.get_global_rank(self.group, 0), group=self.group)
            value = loss.shard_loss(gathered, labels, shards.rows, alpha, weights=weights)
        else:
            value = loss.shard_loss(gathered, labels, shards.rows, weights=weights)
        if isinstance(self.loss, CalibratedRankLoss):
            return self.loss.with_term(value, gathered, labels, share=1 / shards.size)
        return value


def _inner(loss: RankLoss | SiMix | EmbeddingMemory | CalibratedRankLoss) -> RankLoss | SiMix | EmbeddingMemory:
    """The loss without a term around it."""
    return loss.loss if isinstance(loss, CalibratedRankLoss) else loss


class _Shards:
    """How many rows each process has."""

    def __init__(self, counts: list[int], rank: int, group: "dist.ProcessGroup | None") -> None:
        self.counts, self.group, self.size = counts, group, len(counts)
        start = sum(counts[:rank])
        self.rows = slice(start, start + counts[rank])

    @classmethod
    def of(
        cls, embeddings: Tensor, labels: Tensor | Relevance, weights: Tensor | None, group: "dist.ProcessGroup | None"
    ) -> "_Shards":
        """Compare the shapes of all processes; all of them raise where they do not fit, so that none hangs."""
        caller = "DistributedRankLoss"
        check_tensor(embeddings, name="embeddings", caller=caller)
        if not isinstance(labels, Relevance):
            check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller=caller)
        if weights is not None:
            check_weights(weights, items=len(embeddings), validate=False, caller=caller)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        mine = torch.tensor([len(embeddings), *embeddings.shape[1:2], weights is not None], device=embeddings.device)
        shapes = mine.new_empty(size * len(mine))
        dist.all_gather_into_tensor(shapes, mine, group=group)
        counts, dimensions, weighted = shapes.view(size, -1).t().tolist()
        if min(counts) == 0 or len(set(dimensions)) > 1:
            got = ", ".join(f"{items} x {width}" for items, width in zip(counts, dimensions, strict=True))
            raise ValueError(
                f"{caller}: every process must bring at least one embedding, all of the same dimensions, got {got} by rank"
            )
        if len(set(weighted)) > 1:
            without = ", ".join(str(rank) for rank, given in enumerate(weighted) if not given)
            raise ValueError(f"{caller}: every process must give weights or none, got none by rank {without}")
        return cls(counts, rank, group)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the order of the ranks."""
        most = max(self.counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = rows.new_empty(self.size * most, *rows.shape[1:])
        dist.all_gather_into_tensor(found, padded, group=self.group)
        if min(self.counts) == most:
            return found
        return torch.cat([part[:count] for part, count in zip(found.split(most), self.counts, strict=True)])

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """This process's rows of the sum over all processes."""
        if dist.get_backend(self.group) != "nccl":  # the others sum all rows whatever they are asked
            total = rows.contiguous().clone()
            dist.all_reduce(total, group=self.group)
            return total[self.rows]
        most = max(self.counts)
        padded = rows.new_zeros(self.size * most, *rows.shape[1:])
        for part, given in zip(padded.split(most), rows.split(self.counts), strict=True):
            part[: len(given)] = given
        found = rows.new_empty(most, *rows.shape[1:])
        dist.reduce_scatter_tensor(found, padded, group=self.group)
        return found[: self.rows.stop - self.rows.start]


def gather_ragged(rows: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """The rows of all processes, each of which may have any number of them."""
    counts = torch.empty(dist.get_world_size(group), dtype=torch.long, device=rows.device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(rows)], device=rows.device), group=group)
    return _Shards(counts.tolist(), dist.get_rank(group), group).gather(rows)


class _Gather(torch.autograd.Function):
    """Embeddings of all processes; the gradients of all processes add up at the owner, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, shards: _Shards) -> Tensor:
        ctx.shards, ctx.dtype = shards, embeddings.dtype
        return shards.gather(embeddings).to(torch.promote_types(embeddings.dtype, torch.float32))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.reduce_scatter(grad).to(ctx.dtype), None


class _Sum(torch.autograd.Function):
    """The sum of all processes' shards of the loss; its gradient goes to every shard, times a factor."""

    @staticmethod
    def forward(ctx: Any, shard_loss: Tensor, factor: int, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.factor = factor
        total = shard_loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None
