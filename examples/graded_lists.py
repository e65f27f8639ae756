"""Learning to rank: lists of unequal length with graded relevance, optimised for NDCG.

python examples/graded_lists.py
"""

import argparse

import torch
from torch import nn

import rankgrad as rg


def make_lists(queries: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [Q, n, 12], grades 0 to 4 [Q, n] and which documents exist [Q, n]."""
    features = torch.randn(queries, 40, 12, generator=generator)
    quality = features[..., :4].tanh().sum(dim=2) + 0.5 * torch.randn(queries, 40, generator=generator)
    grades = torch.bucketize(quality, torch.tensor([0.0, 1.0, 1.8, 2.5]))
    lengths = torch.randint(10, 41, (queries, 1), generator=generator)
    return features, grades, torch.arange(40) < lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    scorer = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3)
    loss = rg.RankLoss(rg.Sigmoid(0.1), rg.NDCG())
    exact = rg.RankLoss(rg.Exact(), rg.NDCG())
    held_out = make_lists(500, torch.Generator().manual_seed(1))

    def ndcg() -> float:
        features, grades, exists = held_out
        with torch.inference_mode():
            return 1 - exact.from_scores(scorer(features).squeeze(2), grades, candidates=exists).item()

    print(f"before: NDCG {ndcg():.3f}")
    for _ in range(options.steps):
        features, grades, exists = make_lists(64, generator)
        value = loss.from_scores(scorer(features).squeeze(2), grades, candidates=exists)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print(f"after:  NDCG {ndcg():.3f}")


if __name__ == "__main__":
    main()
