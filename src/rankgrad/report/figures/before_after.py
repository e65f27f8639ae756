"""What queries retrieve before and after training, in pictures."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

import rankgrad as rg
from rankgrad._messages import Progress
from rankgrad.data.glyphs import Glyphs, load_glyphs
from rankgrad.data.samplers import ClassBalanced
from rankgrad.report.figures.style import LEFT, SMALL, Theme, new_figure

QUERIES, NEIGHBOURS = 5, 7
BATCH, PER_CLASS = 384, 4
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Retrieved:
    """Queries with their nearest neighbours, untrained and trained, and the metrics of all test drawings."""

    pictures: NDArray[np.uint8]  # [2, queries, 1 + neighbours, H, W], the query first
    relevant: NDArray[np.bool_]  # [2, queries, neighbours]
    recall_at_1: tuple[float, float]
    mean_average_precision: tuple[float, float]
    steps: int
    items: int


def network() -> nn.Module:
    """[N, 1, 32, 32] -> [N, 64]; with group norm an embedding does not depend on its batch."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 64))


def compute(*, steps: int = 300, seed: int = 0) -> Retrieved:
    """Train with `RecallAtKLoss` on the training characters; the queries are drawn at random from the test ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network()
    train_set, test_set = load_glyphs("train"), load_glyphs("test")
    queries = np.random.default_rng(seed).choice(len(test_set.labels), QUERIES, replace=False)
    found = [_retrieve(model, test_set, queries)]
    _train(model, train_set, steps, seed)
    found.append(_retrieve(model, test_set, queries))
    order = np.array([rows for rows, _ in found])  # [2, queries, 1 + neighbours]
    results = [result for _, result in found]
    return Retrieved(
        pictures=test_set.images[order],
        relevant=test_set.labels[order[..., 1:]] == test_set.labels[queries][None, :, None],
        recall_at_1=(results[0]["R@1"], results[1]["R@1"]),
        mean_average_precision=(results[0]["mAP"], results[1]["mAP"]),
        steps=steps,
        items=len(test_set.labels),
    )


def _train(model: nn.Module, glyphs: Glyphs, steps: int, seed: int) -> None:
    loss, sampler = rg.RecallAtKLoss(), ClassBalanced(glyphs.labels, BATCH, PER_CLASS, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    done = 0
    with Progress(steps, "before-after", unit="steps") as progress:
        while done < steps:
            sampler.set_epoch(sampler.epoch + 1)
            for batch in list(sampler)[: steps - done]:
                optimizer.zero_grad()
                loss(model(_as_input(glyphs, batch)), torch.from_numpy(glyphs.labels[batch])).backward()
                optimizer.step()
                done += 1
                progress.advance()


def _as_input(glyphs: Glyphs, rows: "slice | list[int]") -> Tensor:
    return torch.from_numpy(glyphs.images[rows])[:, None] / 255


@torch.inference_mode()
def _retrieve(model: nn.Module, glyphs: Glyphs, queries: NDArray[np.int64]) -> tuple[NDArray[np.int64], rg.Result]:
    """[queries, 1 + neighbours] rows, and the metrics of all drawings."""
    chunks = [slice(start, start + 1000) for start in range(0, len(glyphs.labels), 1000)]
    embeddings = torch.cat([model(_as_input(glyphs, chunk)) for chunk in chunks])
    unit = nn.functional.normalize(embeddings)
    scores = unit[queries] @ unit.t()
    scores[torch.arange(len(queries)), torch.from_numpy(queries)] = -torch.inf
    nearest = scores.topk(NEIGHBOURS).indices.numpy()
    return np.concatenate([queries[:, None], nearest], axis=1), rg.evaluate(embeddings, torch.from_numpy(glyphs.labels))


def draw(numbers: Retrieved, theme: Theme) -> Figure:
    """Draw both sets of neighbours side by side, relevant ones in blue frames."""
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            f"R@1 of unseen characters: {numbers.recall_at_1[0]:.0%} before training, {numbers.recall_at_1[1]:.0%} after",
            "five random queries and their nearest neighbours; blue frames have the query's character, orange ones do not",
        )
        for side, name in enumerate(("before", f"after {numbers.steps} steps")):
            _side(figure, numbers.pictures[side], numbers.relevant[side], name, LEFT + 0.47 * side, theme)
    return figure


def _side(
    figure: Figure, pictures: NDArray[np.uint8], relevant: NDArray[np.bool_], name: str, left: float, theme: Theme
) -> None:
    width, height, gap = 0.044, 0.1, 0.0065
    figure.text(left, 0.79, name, fontweight="bold", va="center")
    for row, (line, marks) in enumerate(zip(pictures, relevant, strict=True)):
        for column, picture in enumerate(line):
            x = left + column * (width + gap) + (0.014 if column else 0)
            axes = figure.add_axes((x, 0.62 - row * (height + 0.025), width, height))
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            colour = theme.ink if column == 0 else theme.relevant if marks[column - 1] else theme.irrelevant
            for spine in axes.spines.values():
                spine.set(visible=True, color=colour, linewidth=3)
            if row == 0:
                axes.set_title("query" if column == 0 else str(column), fontsize=SMALL, color=theme.muted, pad=5)


def caption(numbers: Retrieved) -> str:
    """What the figure shows and how it was computed."""
    return (
        f"{QUERIES} drawings chosen at random among the {numbers.items:,} test drawings of the built-in glyphs, and their "
        f"{NEIGHBOURS} nearest neighbours by cosine, before and after {numbers.steps} steps of `RecallAtKLoss` on a network of "
        "three convolutions. The characters were not in the training set. R@1 over all test drawings "
        f"{numbers.recall_at_1[0]:.1%} and {numbers.recall_at_1[1]:.1%}, mAP {numbers.mean_average_precision[0]:.1%} and "
        f"{numbers.mean_average_precision[1]:.1%}."
    )
