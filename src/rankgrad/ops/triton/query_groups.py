"""How queries are cut into groups for the kernels, and the lists that they read of each."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankgrad.ops import relevance as relevance_module
from rankgrad.ops.labels import IntervalRelevance
from rankgrad.ops.pair_relevance import PairRelevance
from rankgrad.ops.relevance import EngineRelevance, rounded_width
from rankgrad.ops.triton.tiles import TILE


@dataclass(frozen=True)
class QueryGroups:
    """Queries in groups of whole tiles with about as many positives."""

    relevance: EngineRelevance
    groups: list[slice]
    widths: list[int]
    mean: int  # positives of a query

    @classmethod
    def of(cls, relevance: EngineRelevance, device: torch.device) -> "QueryGroups":
        queries = len(relevance.query_order)
        short = -queries % TILE
        tiles = torch.nn.functional.pad(relevance.num_relevant, (0, short)).view(-1, TILE)
        *per_tile, pairs = torch.cat((tiles.amax(dim=1), tiles.sum()[None])).tolist()
        mean = rounded_width(-(-pairs // queries))  # rounded like those of a captured call, so that both sum in the same order
        if queries * max(per_tile) <= relevance_module.ONE_GROUP:
            return cls(relevance.to(device), [slice(0, queries)], [rounded_width(max(per_tile))], mean)
        groups: list[slice] = []
        widths: list[int] = []
        for tile, most in enumerate(per_tile):
            width, stop = rounded_width(most), min((tile + 1) * TILE, queries)
            if widths and widths[-1] == width:
                groups[-1] = slice(groups[-1].start, stop)
            else:
                groups.append(slice(tile * TILE, stop))
                widths.append(width)
        return cls(relevance.to(device), groups, widths, mean)

    @cached_property
    def lists(self) -> dict[str, Tensor]:
        """Int32 as the kernels read them: [Q] each, and for listed pairs `columns`, which start and stop are then places of."""
        r = self.relevance
        if isinstance(r, PairRelevance):
            start, stop, columns = r.edges[:-1], r.edges[1:], r.ascending_columns().int()
        else:
            assert isinstance(r, IntervalRelevance)
            start, stop, columns = r.start, r.stop, None
        stacked = torch.stack((start, stop, r.self_column, r.num_relevant)).int()
        named = dict(zip(("start", "stop", "self_index", "num_relevant"), stacked, strict=True))
        return {**named, "columns": stacked if columns is None or not len(columns) else columns}

    @cached_property
    def offsets(self) -> Tensor:
        """[Q] where a query begins when the relevant pairs of all groups, padding included, are one row-major array."""
        parts, begin = [], 0
        for group, width in zip(self.groups, self.widths, strict=True):
            rows, step = group.stop - group.start, max(width, 1)  # where a query without positives begins is not read
            parts.append(torch.arange(begin, begin + rows * step, step, device=self.relevance.query_order.device))
            begin += rows * width
        return parts[0] if len(parts) == 1 else torch.cat(parts)
