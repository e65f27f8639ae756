"""Learning to rank: lists of unequal length with graded relevance, a network trained on NDCG beside LightGBM's lambdarank.

python examples/learning_to_rank.py
"""

import argparse
import importlib.util

import torch
from torch import Tensor, nn

import rankgrad as rg


def make_lists(queries: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Features [N, 12] and grades 0 to 4 [N] of lists that follow each other, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 41, (queries,), generator=generator).tolist()
    features = torch.randn(sum(sizes), 12, generator=generator)
    quality = features[:, :4].tanh().sum(dim=1) + 0.5 * torch.randn(len(features), generator=generator)
    return features, torch.bucketize(quality, torch.tensor([0.0, 1.0, 1.8, 2.5])), sizes


def show(name: str, scores: Tensor, grades: Tensor, sizes: list[int]) -> None:
    result = rg.evaluate_scores(scores, 2**grades - 1, group_sizes=sizes, ks=(10,))
    low, high = result.intervals()["NDCG@10"]
    print(f"{name}: NDCG@10 {result['NDCG@10']:.3f} [{low:.3f}, {high:.3f}]")


def train_network(features: Tensor, grades: Tensor, sizes: list[int], epochs: int) -> nn.Module:
    scorer = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3)
    loss = rg.ApproxNDCGLoss(tau=0.3)
    lists = list(zip(features.split(sizes), grades.split(sizes), strict=True))
    for _ in range(epochs):
        for batch in torch.randperm(len(lists)).split(50):
            some, their_grades = zip(*(lists[query] for query in batch), strict=True)
            scores = scorer(torch.cat(some)).squeeze(1)
            value = loss.from_scores(scores, 2 ** torch.cat(their_grades) - 1, group_sizes=[len(each) for each in some])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    torch.manual_seed(0)
    features, grades, sizes = make_lists(options.queries, seed=0)
    test_features, test_grades, test_sizes = make_lists(500, seed=1)
    scorer = train_network(features, grades, sizes, options.epochs)
    with torch.inference_mode():
        show("network on ApproxNDCG", scorer(test_features).squeeze(1), test_grades, test_sizes)
    if importlib.util.find_spec("lightgbm"):
        import lightgbm

        data = lightgbm.Dataset(features.numpy(), grades.numpy(), group=sizes)
        model = lightgbm.train({"objective": "lambdarank", "num_leaves": 15, "verbosity": -1, "num_threads": 1}, data, 100)
        show("LightGBM lambdarank", torch.from_numpy(model.predict(test_features.numpy())), test_grades, test_sizes)


if __name__ == "__main__":
    main()
