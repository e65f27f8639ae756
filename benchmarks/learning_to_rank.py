"""`python -m benchmarks.learning_to_rank`: LightGBM, a LambdaRank loss and ours on generated lists, tuned with equal care.

Every method has four settings. Each is trained once (seed 0) and judged by NDCG@10 on validation lists, which also say where
training stops: LightGBM at its best number of trees, a network at its best epoch. The best setting is trained with three seeds
and tested once.

    smooth   relevance is a smooth function of directions that are not those of the features
    steps    relevance depends on thresholds of single features, some of them heavy-tailed, and on two features together

`--page` writes the table of docs/learning_to_rank.md from the results.
"""

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rankgrad as rg
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import provenance
from rankgrad._files import replace_file
from rankgrad._messages import markdown_table
from rankgrad.eval.result import bootstrap_intervals

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "learning-to-rank.csv", ROOT / "docs" / "learning_to_rank.md"
BEGIN, END = "<!-- begin: python -m benchmarks.learning_to_rank --page -->\n", "<!-- end -->\n"
FEATURES, LONGEST, METRIC = 20, 40, "NDCG@10"
KINDS = ("smooth", "steps")
SPLITS = {"train": 400, "validation": 200, "test": 1000}
EPOCHS, BATCH = 40, 25
SEEDS = (0, 1, 2)
LAMBDARANK, LIGHTGBM = "LambdaRank, network", "LambdaRank, LightGBM"


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of unequal length, one after another."""

    features: Tensor  # [N, F]
    gains: Tensor  # [N] 2**grade - 1
    sizes: list[int]

    @property
    def grades(self) -> Tensor:
        return (self.gains + 1).log2().round().long()

    @cached_property
    def parts(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Features and gains of each list."""
        return self.features.split(self.sizes), self.gains.split(self.sizes)

    def select(self, queries: Sequence[int]) -> "Lists":
        """Some of the lists."""
        chosen = [torch.cat([each[query] for query in queries]) for each in self.parts]
        return Lists(chosen[0], chosen[1], [self.sizes[query] for query in queries])

    def ndcg(self, scores: Tensor) -> np.ndarray[tuple[int], np.dtype[Any]]:
        """[Q] NDCG@10 of the lists that have a relevant document."""
        result = rg.evaluate_scores(scores, self.gains, group_sizes=self.sizes, ks=(10,))
        return result.per_query["ndcg@10"].astype(float)


def make_lists(kind: str, split: str, queries: int) -> Lists:
    """Grades 0 to 4, about half of the documents irrelevant."""
    generator = torch.Generator().manual_seed(1000 * KINDS.index(kind) + list(SPLITS).index(split))
    sizes = torch.randint(10, LONGEST + 1, (queries,), generator=generator).tolist()
    x = torch.randn(sum(sizes), FEATURES, generator=generator)
    # what a query adds to all of its documents, which no ranker needs but every ranker sees
    x[:, :2] = torch.randn(queries, 2, generator=generator).repeat_interleave(torch.tensor(sizes), dim=0)
    noise = 0.4 * torch.randn(len(x), generator=generator)
    if kind == "smooth":
        directions = torch.linalg.qr(torch.randn(FEATURES - 2, 5, generator=torch.Generator().manual_seed(7))).Q
        hidden = x[:, 2:] @ directions
        quality = hidden[:, :3].tanh().sum(dim=1) + 1.5 * (hidden[:, 3] * hidden[:, 4]).tanh() + noise
    else:
        quality = (x[:, 2] > 0.3) + (x[:, 3].abs() < 0.7) + 1.5 * ((x[:, 4] > 0) ^ (x[:, 5] > 0)) + 0.5 * x[:, 6].tanh() + noise
        x[:, 4:9] = x[:, 4:9].sinh()
    edges = torch.quantile(quality[: 2**14], torch.tensor([0.5, 0.7, 0.85, 0.95]))
    return Lists(x, 2.0 ** torch.bucketize(quality, edges) - 1, sizes)


def lambdarank(sigma: float) -> Callable[[Tensor, Lists], Tensor]:
    """LambdaRank (Burges, 2010): the logistic loss of pairs, each weighted by what exchanging the two does to NDCG."""

    def loss(scores: Tensor, lists: Lists) -> Tensor:
        s, gains = (
            nn.utils.rnn.pad_sequence(list(each.split(lists.sizes)), batch_first=True) for each in (scores, lists.gains)
        )
        exists = torch.arange(s.shape[1]) < torch.tensor(lists.sizes)[:, None]
        places = 1 / torch.log2(torch.arange(s.shape[1], dtype=s.dtype) + 2)
        order = s.detach().masked_fill(~exists, -torch.inf).argsort(dim=1, descending=True)
        discount = torch.empty_like(s).scatter_(1, order, places.expand_as(s))
        ideal = (gains.sort(dim=1, descending=True).values * places).sum(dim=1).clamp(min=1e-9)
        change = (gains[:, :, None] - gains[:, None]) * (discount[:, :, None] - discount[:, None])
        better = (gains[:, :, None] > gains[:, None]) & exists[:, :, None] & exists[:, None]
        cost = nn.functional.softplus(-sigma * (s[:, :, None] - s[:, None])) * change.abs() * better
        return (cost.sum(dim=(1, 2)) / ideal).mean()

    return loss


def rank_loss(loss: rg.RankLoss) -> Callable[[Tensor, Lists], Tensor]:
    """`loss` as a function of scores and lists."""
    return lambda scores, lists: loss.from_scores(scores, lists.gains, group_sizes=lists.sizes)


Setting = Mapping[str, float]
NETWORKS: Mapping[str, tuple[str, Sequence[float], Callable[[float], Callable[[Tensor, Lists], Tensor]]]] = {
    LAMBDARANK: ("sigma", (1.0, 3.0), lambdarank),
    "Sigmoid x NDCG (ApproxNDCG)": ("tau", (0.1, 0.5), lambda tau: rank_loss(rg.ApproxNDCGLoss(tau))),
    "Blackbox x NDCG": ("lam", (10.0, 50.0), lambda lam: rank_loss(rg.RankLoss(rg.Blackbox(lam, 0.2), rg.NDCG()))),
    "UpperBound x NDCG": (
        "tau", (0.1, 0.5), lambda tau: rank_loss(rg.RankLoss(rg.UpperBound(tau, 1 / tau, 5 * tau), rg.NDCG())),
    ),
}  # fmt: skip
RATES = (3e-3, 2e-2)
TREES: Sequence[Setting] = [{"leaves": n, "lr": lr} for n, lr in itertools.product((15, 31), (0.1, 0.3))]


def settings_of(method: str) -> Sequence[Setting]:
    """What is tried on validation lists."""
    if method == LIGHTGBM:
        return TREES
    name, values, _ = NETWORKS[method]
    return [{name: value, "lr": lr} for value, lr in itertools.product(values, RATES)]


def train(method: str, setting: Setting, seed: int, data: Mapping[str, Lists], epochs: int) -> Callable[[Tensor], Tensor]:
    """A scorer of features, the best on validation lists of those that training passed through."""
    if method == LIGHTGBM:
        return _train_trees(setting, seed, data, most=25 * epochs)
    name, _, make = NETWORKS[method]
    return _train_network(make(setting[name]), setting["lr"], seed, data, epochs)


def _train_network(
    loss: Callable[[Tensor, Lists], Tensor], lr: float, seed: int, data: Mapping[str, Lists], epochs: int
) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(seed)
    train = data["train"]
    mean, std = compressed(train.features).mean(dim=0), compressed(train.features).std(dim=0)
    network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def score(features: Tensor) -> Tensor:
        scores: Tensor = network((compressed(features) - mean) / std).squeeze(1)
        return scores

    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    steps = epochs * -(-len(train.sizes) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, kept = -1.0, {}
    for _ in range(epochs):
        for batch in torch.randperm(len(train.sizes)).split(BATCH):
            lists = train.select(batch.tolist())
            value = loss(score(lists.features), lists)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            found = float(data["validation"].ndcg(score(data["validation"].features)).mean())
        if found > best:
            best, kept = found, {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(kept)
    return torch.no_grad()(score)


def compressed(features: Tensor) -> Tensor:
    """Features with shorter tails, as is usual for networks; trees do not care."""
    return features.sign() * features.abs().log1p()


def _train_trees(setting: Setting, seed: int, data: Mapping[str, Lists], *, most: int) -> Callable[[Tensor], Tensor]:
    import lightgbm

    parameters = {
        "objective": "lambdarank", "metric": "ndcg", "eval_at": [10], "num_leaves": int(setting["leaves"]),
        "learning_rate": setting["lr"], "bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8, "seed": seed,
        "num_threads": 1, "verbosity": -1,
    }  # fmt: skip
    train, validation = (
        lightgbm.Dataset(lists.features.numpy(), lists.grades.numpy(), group=lists.sizes)
        for lists in (data["train"], data["validation"])
    )
    stop = lightgbm.early_stopping(50, verbose=False)
    model = lightgbm.train(parameters, train, most, valid_sets=[validation], callbacks=[stop])
    return lambda features: torch.from_numpy(model.predict(features.numpy(), num_iteration=model.best_iteration))


def compare(kind: str, methods: Sequence[str], counts: Mapping[str, int], epochs: int) -> list[dict[str, str]]:
    """One row per seed, and one for their mean with intervals over the lists of the test."""
    data = {split: make_lists(kind, split, queries) for split, queries in counts.items()}
    tests: dict[str, np.ndarray[Any, Any]] = {}
    rows: list[dict[str, str]] = []
    for method in methods:
        began, judged = time.perf_counter(), []
        for setting in settings_of(method):
            scorer = train(method, setting, 0, data, epochs)
            judged.append(float(data["validation"].ndcg(scorer(data["validation"].features)).mean()))
        setting = settings_of(method)[int(np.argmax(judged))]
        found = [data["test"].ndcg(train(method, setting, seed, data, epochs)(data["test"].features)) for seed in SEEDS]
        shown = {"data": kind, "method": method, "setting": " ".join(f"{k}={v:g}" for k, v in setting.items())}
        for seed, values in zip(SEEDS, found, strict=True):
            rows.append({**shown, "seed": str(seed), **_mean_and_interval(values), "validation": f"{max(judged):.4f}"})
        tests[method] = np.mean(found, axis=0)
        rows.append({**shown, "seed": "mean", **_mean_and_interval(tests[method]), "validation": f"{max(judged):.4f}"})
        tried = ", ".join(f"{value:.4f}" for value in judged)
        print(f"{kind}, {method}: {time.perf_counter() - began:.0f} s, validation {tried}", file=sys.stderr, flush=True)
    for row in rows:
        against = tests[row["method"]] - tests[LAMBDARANK] if row["seed"] == "mean" and LAMBDARANK in tests else None
        row["difference"], row["difference_low"], row["difference_high"] = (
            ("", "", "") if against is None else _numbers(against)
        )
    return rows


def _numbers(values: np.ndarray[Any, Any]) -> tuple[str, str, str]:
    low, high = bootstrap_intervals(values[:, None], np.arange(len(values)), level=0.95, samples=2000, seed=0)[0]
    return f"{values.mean():.4f}", f"{low:.4f}", f"{high:.4f}"


def _mean_and_interval(values: np.ndarray[Any, Any]) -> dict[str, str]:
    return dict(zip((METRIC, "low", "high"), _numbers(values), strict=True))


def page_table(path: Path) -> str:
    """The table of the page, from the rows of a results file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in (row for row in rows if row["seed"] == "mean"):
        same = [float(each[METRIC]) for each in rows if each["seed"] != "mean" and (each["data"], each["method"]) == (
            row["data"], row["method"])]  # fmt: skip
        difference = (
            f"{float(row['difference']):+.4f} [{float(row['difference_low']):+.4f}, {float(row['difference_high']):+.4f}]"
        )
        value = f"{row[METRIC]} [{row['low']}, {row['high']}]"
        lines.append([row["data"], row["method"], row["setting"], value, f"{statistics.pstdev(same):.4f}", difference])
    columns = ["lists", "method", "chosen on validation", METRIC, "between seeds", "minus LambdaRank on the network"]
    return markdown_table(columns, lines)


def write_page(path: Path, results: Path) -> None:
    """Replace the table of the page by that of the results."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    replace_file(path, f"{before}{BEGIN}\n{page_table(results)}\n{END}{rest.partition(END)[2]}")


def main(arguments: list[str] | None = None) -> int:
    """Compare, print the rows and write them; or write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_to_rank", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file to add to")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="generated data sets")
    parser.add_argument("--quick", action="store_true", help="few lists and epochs, to see that it runs")
    parser.add_argument("--page", action="store_true", help="run nothing; write the table of the page from the CSV file")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(PAGE, options.out)
        return 0
    torch.set_num_threads(1)
    counts = dict.fromkeys(SPLITS, 60) if options.quick else SPLITS
    rows = [
        {**row, **provenance(torch.device("cpu"))}
        for kind in options.kinds
        for row in compare(kind, [LIGHTGBM, *NETWORKS], counts, epochs=2 if options.quick else EPOCHS)
    ]
    print(text_table([{name: row[name] for name in list(row)[:11]} for row in rows]))
    append_csv(options.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
