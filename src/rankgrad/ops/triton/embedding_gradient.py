"""The gradient of embeddings: products with the gradient of scores, and what the relevant pairs add to them."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from rankgrad._dry_run import launch_instead
from rankgrad.ops.labels import IntervalRelevance
from rankgrad.ops.pair_relevance import PairRelevance
from rankgrad.ops.triton.embedding_kernels import gather_kernel
from rankgrad.ops.triton.operands import Operands
from rankgrad.ops.triton.query_groups import QueryGroups

# float16 products with a float32 result came with torch 2.8; before, the factors are widened first, which is slower
MIXED_PRODUCTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


class EmbeddingGradient:
    """The gradient of queries and candidates, or of one set of embeddings in both roles (`bases` has one).

    The gradient of the scores comes in multiples of `unit`, some rows at a time, in class order.
    """

    def __init__(
        self, bases: Sequence[Tensor], queries: Operands, candidates: Operands, layout: QueryGroups, unit: Tensor
    ) -> None:
        self.bases, self.queries, self.candidates, self.layout, self.unit = bases, queries, candidates, layout, unit
        self.relevance = layout.relevance
        self.symmetric = len(bases) == 1 and self.relevance.symmetric
        operands = (queries,) if self.symmetric else (queries, candidates)
        self.products = [torch.empty(len(of.plain), of.plain.shape[1] // of.parts, device=of.plain.device) for of in operands]

    def add(self, gradient: list[Tensor], rows: slice) -> None:
        """Multiply with the gradient of the scores of these queries: with all candidates, or from the first of `rows` on.

        The latter where scores are symmetric: what stands beyond the square of the rows is of both of its queries.
        """
        if launch_instead():  # these products are half of a call's time
            return
        queries, candidates, first = self.queries.plain, self.candidates.plain, not rows.start
        if self.symmetric:
            _add_products(self.products[0][rows], gradient, candidates[rows.start :], first=first)
            if rows.stop < len(self.relevance.query_order):
                beyond = [g[:, rows.stop - rows.start :].t() for g in gradient]
                _add_products(self.products[0][rows.stop :], beyond, queries[rows], first=first)
        else:
            _add_products(self.products[0][rows], gradient, candidates, first=True)
            _add_products(self.products[1], [g.t() for g in gradient], queries[rows], first=first)

    def finish(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the bases, with those of the relevant pairs; call it once."""
        r, lists = self.relevance, self.layout.lists
        first, last = self.bases[0], self.bases[-1]
        if isinstance(r, PairRelevance):
            return self._of_pairs(r, r.values(d_positives))
        assert isinstance(r, IntervalRelevance)
        parts = [d.contiguous().view(-1) for d in d_positives]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        partners = {"first_partner": lists["start"], "last_partner": lists["stop"]}
        if self.symmetric:
            return (self._gather(2, first, r.query_order, first, r.query_order, flat, partners),)
        d_queries = self._gather(0, first, r.query_order, last, r.candidate_order, flat, partners)
        begin, end = r.query_intervals()
        partners = {"first_partner": begin.int(), "last_partner": end.int()}
        return d_queries, self._gather(1, last, r.candidate_order, first, r.query_order, flat, partners)

    def _of_pairs(self, pairs: PairRelevance, values: Tensor) -> tuple[Tensor, ...]:
        sums = (
            pairs.candidates_of_queries(values, self.bases[-1][pairs.candidate_order]),
            pairs.queries_of_candidates(values, self.bases[0][pairs.query_order]),
        )
        orders, others = (pairs.query_order, pairs.candidate_order), (self.candidates, self.queries)
        grads = []
        for found, product, order, other in zip(sums, self.products, orders, others, strict=True):
            rows, d = found.shape
            found.addcmul_(product[:rows, :d], self.unit / other.scale)
            grads.append(torch.empty_like(found).index_copy_(0, order, found))
        return (grads[0].add_(grads[1]),) if len(self.bases) == 1 else tuple(grads)

    def _gather(
        self,
        role: int,
        base: Tensor,
        order: Tensor,
        partners: Tensor,
        partner_order: Tensor,
        flat: Tensor,
        intervals: dict[str, Tensor],
    ) -> Tensor:
        out = torch.empty_like(base)
        items, d = out.shape
        other, product = (self.queries, self.products[-1]) if role == 1 else (self.candidates, self.products[0])
        block = min(128, max(16, triton.next_power_of_2(d)))
        gather_kernel[(triton.cdiv(items, 32), triton.cdiv(d, block))](
            partners=partners,
            partner_order=partner_order,
            d_positives=flat,
            offset=self.layout.offsets,
            start=self.layout.lists["start"],
            self_index=self.layout.lists["self_index"],
            **intervals,
            product=product,
            product_scale=self.unit / other.scale,
            product_width=product.shape[1],
            order=order,
            out=out,
            items=items,
            d=d,
            pairs=len(flat),
            ROLE=role,
            BI=32,
            BJ=32,
            BD=block,
        )
        return out


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> None:
    """Out = beta * out + alpha * a @ b for float16 a and b with float32 sums; beta 0: whatever out holds."""
    if a.is_cuda and MIXED_PRODUCTS:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=beta, alpha=alpha)


def _add_products(out: Tensor, gradient: list[Tensor], rows: Tensor, *, first: bool) -> None:
    """Out += gradient @ rows, or, if these are the `first`, out = gradient @ rows.

    Of one part each or of a high and a low part; the low part of the gradient is kept 2048 times.
    """
    width, beta = out.shape[1], 0.0 if first else 1.0
    if len(gradient) > 1:
        _add_product(out, gradient[1], rows[:, :width], beta=beta, alpha=1 / 2048)
        _add_product(out, gradient[0], rows[:, width:], beta=1.0)
        beta = 1.0
    _add_product(out, gradient[0], rows[:, :width], beta=beta)
