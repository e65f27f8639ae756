"""Items with several labels: two are relevant to each other if they share one, the more labels the better.

    python examples/multi_label.py

`rg.Pairs` is a sparse list of (query, item, gain), so nothing of size items x items is stored. The gain of a pair is the number
of labels the two share, and the loss is NDCG, which puts items with more common labels first.
"""

import argparse

import torch
from torch import nn

import rankgrad as rg

TAGS = 12


def make_items(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [N, 40] and tags [N, TAGS] bool: each item has one to four tags, each tag a direction."""
    tags = torch.rand(count, TAGS, generator=generator).argsort(dim=1) < torch.randint(1, 5, (count, 1), generator=generator)
    directions = torch.randn(TAGS, 40, generator=torch.Generator().manual_seed(7))
    return tags.float() @ directions + 2.0 * torch.randn(count, 40, generator=generator), tags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = rg.RankLoss(rg.Sigmoid(0.05), rg.NDCG())
    test, test_tags = make_items(300, generator)
    test_pairs = rg.Pairs.from_multilabel(test_tags, gain="overlap")
    for step in range(options.steps + 1):
        if step % max(options.steps // 3, 1) == 0:
            with torch.inference_mode():
                result = rg.evaluate(model(test), relevance=test_pairs)
            print(f"step {step}: test NDCG {result['NDCG']:.3f}")
        items, tags = make_items(256, generator)
        optimizer.zero_grad()
        loss(model(items), relevance=rg.Pairs.from_multilabel(tags, gain="overlap")).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
