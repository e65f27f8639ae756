"""The papers' pictures: that their numbers show what their titles annotate, and that the slides are fit to be shown."""

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from rankgrad.cli.show_commands import figures as draw_figures
from rankgrad.report import figures
from rankgrad.report.figures import (
    batch_bias,
    before_after,
    bins,
    landscape,
    learning_curve,
    margin,
    style,
    surrogate,
    virtual_examples,
)
from rankgrad.report.figures import pictures as pictures_module

THEMES = {"light": style.LIGHT, "dark": style.DARK}


def gaussian_classes(classes: int, per_class: int, *, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 16, generator=generator)
    points = centres.repeat_interleave(per_class, dim=0) + noise * torch.randn(classes * per_class, 16, generator=generator)
    return points, torch.arange(classes).repeat_interleave(per_class)


@pytest.fixture(scope="module")
def surface():
    return landscape.compute(grid=61, arrows=5)


def random_lists(count: int, items: int, relevant: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(count, items, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores, (torch.arange(items) < relevant).expand_as(scores)


@pytest.mark.parametrize("lam", [0.05, 0.3, 2.0])
def test_the_interpolation_is_that_of_the_definition(lam):
    """Over all permutations s: min [L(s) + y.s / lambda] - min y.s / lambda."""
    scores, relevance = random_lists(40, items=5, relevant=2)
    orders = torch.tensor(list(itertools.permutations(range(1, 6))), dtype=torch.float64)
    raw = lam * 5
    products = scores @ orders.t() / raw
    wanted = (orders[:, :2].mean(dim=1) + products).amin(dim=1) - products.amin(dim=1)
    torch.testing.assert_close(landscape.interpolation(scores, relevance, lam), wanted)


def test_the_gradient_of_the_interpolation_is_the_one_that_blackbox_returns():
    scores, relevance = random_lists(30, items=8, relevant=3)
    _, gradient = landscape.value_and_gradient(scores, relevance, 0.2)
    step = 1e-6
    for item in range(8):
        shift = step * (torch.arange(8) == item)
        rise = landscape.interpolation(scores + shift, relevance, 0.2) - landscape.interpolation(scores - shift, relevance, 0.2)
        torch.testing.assert_close(rise / (2 * step), gradient[:, item], atol=1e-6, rtol=0)
    assert gradient.any(dim=1).float().mean() > 0.5


def test_the_exact_loss_is_the_mean_rank_and_a_staircase(surface):
    scores, relevance = random_lists(20, items=8, relevant=3)
    counted = torch.stack([torch.stack([(row >= row[i]).sum() for i in range(3)]).double().mean() for row in scores])
    torch.testing.assert_close(landscape.value_and_gradient(scores, relevance, 0.1)[0], counted)
    # a mean of three ranks is a multiple of a third: nothing between
    thirds = 3 * surface.exact
    assert np.allclose(thirds, thirds.round())
    assert len(np.unique(thirds.round())) > 5


def test_interpolations_touch_the_loss_less_the_larger_lambda_is_and_never_pass_it(surface):
    assert (surface.interpolated <= surface.exact + 1e-9).all()
    touching = [(np.abs(each - surface.exact) < 1e-9).mean() for each in surface.interpolated]
    assert touching[0] > 0.3
    assert touching[0] > touching[1] > touching[2]


def test_interpolations_have_no_jumps(surface):
    finer = landscape.compute(grid=183, arrows=5)
    for coarse, fine in zip(surface.interpolated_on_line, finer.interpolated_on_line, strict=True):
        # three times the points, a third of the difference between neighbours
        assert np.abs(np.diff(fine)).max() < 0.4 * np.abs(np.diff(coarse)).max()
    assert np.abs(np.diff(finer.exact_on_line)).max() >= 1 / 3 - 1e-9


def test_arrows_go_down(surface):
    """A small step along an arrow lowers the interpolation by the arrow's squared length."""
    generator = torch.Generator().manual_seed(4)
    start, *directions = torch.randn(3, landscape.ITEMS, generator=generator, dtype=torch.float64)
    roots = torch.cartesian_prod(torch.from_numpy(surface.roots), torch.from_numpy(surface.roots))
    relevance = (torch.arange(landscape.ITEMS) < landscape.RELEVANT).expand(len(roots), -1)
    for lam, descent in zip(surface.lambdas, torch.from_numpy(surface.descent).flatten(1, 2), strict=True):
        before, after = (
            landscape.interpolation(start + places @ torch.stack(directions), relevance, lam)
            for places in (roots, roots + 1e-6 * descent)
        )
        torch.testing.assert_close((before - after) / 1e-6, descent.square().sum(dim=1), atol=1e-5, rtol=1e-5)
        assert descent.any()


def average_precision(scores: np.ndarray, relevant: np.ndarray) -> float:
    hits = relevant[np.argsort(-scores)]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


@pytest.fixture(scope="module")
def biased():
    points, labels = gaussian_classes(64, 4, noise=1.5)
    return batch_bias.estimate(points, labels, sizes=(8, 16, 64, 256), batches=20)


def test_a_batch_flatters_less_the_larger_it_is(biased):
    assert (np.diff(biased.mean) < 0).all()
    assert biased.mean[0] > 1.5 * biased.full
    assert biased.deviation[0] > biased.deviation[1] > biased.deviation[2]


def test_a_batch_of_everything_has_the_value_of_the_full_set(biased):
    assert biased.items == 256
    assert biased.mean[-1] == pytest.approx(biased.full, abs=1e-6)
    assert biased.deviation[-1] == pytest.approx(0, abs=1e-6)


def test_the_full_value_is_the_mean_average_precision(biased):
    points, labels = (tensor.numpy() for tensor in gaussian_classes(64, 4, noise=1.5))
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    others = ~np.eye(len(labels), dtype=bool)
    wanted = np.mean(
        [average_precision((unit @ unit[i])[others[i]], (labels == labels[i])[others[i]]) for i in range(len(labels))]
    )
    assert biased.full == pytest.approx(wanted, abs=1e-5)


@pytest.fixture(scope="module")
def collapse():
    return margin.compute(lists=8, steps=400)


def test_without_a_margin_the_gap_closes_and_with_one_it_stays(collapse):
    assert collapse.gap[0, 0] == collapse.gap[1, 0] < -0.5
    without, with_margin = collapse.gap[:, -1]
    assert 0 < without < 0.01
    assert with_margin == pytest.approx(collapse.margins[1], rel=0.1)


def test_without_a_margin_scores_shrink_to_a_tie(collapse):
    spread = collapse.scores.std(axis=2)
    assert spread[0, -1] < 0.2 * spread[0, 0]
    assert spread[1, -1] > 2 * spread[0, -1]


def test_both_rank_perfectly_and_only_one_bears_noise(collapse):
    assert collapse.precision[:, 0] == pytest.approx(1, abs=1e-6)
    assert collapse.precision[0, 5] < 0.6 < 0.95 < collapse.precision[1, 5]


def test_a_perfect_order_gets_no_gradient_without_a_margin_and_some_with():
    scores = torch.tensor([[0.03, 0.02, 0.01, 0.0, -0.01, -0.02]], dtype=torch.float64)
    relevance = torch.arange(6)[None] < 2
    after = {m: margin.descend(scores, relevance, margin=m, steps=1, rate=0.1, decay=0.0)[-1] for m in (0.0, 0.2)}
    assert torch.equal(after[0.0], scores)
    assert (after[0.2][0, :2] > scores[0, :2]).all()


def test_exact_recall_is_counted():
    numbers = surrogate.compute(points=97)
    counted = 1 + (numbers.others[None, :] >= numbers.score[:, None]).sum(axis=1)
    assert np.array_equal(numbers.exact, (counted <= numbers.k).astype(float))
    assert 0 < numbers.exact.mean() < 1


def test_the_surrogate_tends_to_exact_recall_but_for_one_half_at_rank_k():
    numbers = surrogate.compute(points=97)
    others, score = torch.from_numpy(numbers.others), torch.from_numpy(numbers.score)
    clear = np.abs(numbers.score[:, None] - numbers.others).min(axis=1) > 1e-3  # not about to overtake
    rank = 1 + (numbers.others[None, :] >= numbers.score[:, None]).sum(axis=1)
    errors = []
    for tau_rank, tau_cut in ((0.03, 1.0), (0.003, 0.3), (1e-5, 0.03)):
        smooth = surrogate.smooth_recall(score, others, numbers.k, tau_rank=tau_rank, tau_cut=tau_cut).numpy()
        errors.append(np.abs(smooth - numbers.exact)[clear & (rank != numbers.k)].max())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-9
    at_k = clear & (rank == numbers.k)
    assert at_k.any()
    assert smooth[at_k] == pytest.approx(0.5, abs=1e-6)


def test_the_gradient_by_rank_is_that_of_the_sigmoid_and_a_set_has_the_mean():
    rank = torch.linspace(1, 20, 40, dtype=torch.float64)
    one = {k: surrogate.gradient_by_rank(rank, (k,)) for k in (1, 4, 16)}
    for k, gradient in one.items():
        sigmoid = torch.sigmoid(k - rank)
        torch.testing.assert_close(gradient, sigmoid * (1 - sigmoid))
    torch.testing.assert_close(surrogate.gradient_by_rank(rank, (1, 4, 16)), sum(one.values()) / 3)


def test_several_k_reach_more_ranks():
    numbers = surrogate.compute(points=200)
    reached = (numbers.gradients > 0.02).mean(axis=1)
    assert numbers.sets[-1] == (1, 2, 4, 8, 16)
    assert (reached[-1] > reached[:-1]).all()


def test_more_bins_are_closer_to_ap_and_reach_fewer_scores():
    points, labels = gaussian_classes(24, 4, noise=1.0)
    error, reached = zip(*(bins.approximation(points, labels, each) for each in (2, 10, 50, 400)), strict=True)
    assert error[0] > error[1] > error[2] > error[3]
    assert error[3] < 0.2 * error[0]
    assert reached[0] > reached[1] > reached[2] > reached[3] > 0


def test_quality_is_counted():
    points, labels = gaussian_classes(20, 3, noise=1.5)
    unit = torch.nn.functional.normalize(points).numpy()
    scores = unit @ unit.T
    np.fill_diagonal(scores, -np.inf)
    recall, precision = bins.quality(points, labels)
    assert 0.1 < recall < 0.9
    assert recall == pytest.approx((labels.numpy()[scores.argmax(axis=1)] == labels.numpy()).mean(), abs=1e-6)
    assert precision == pytest.approx(batch_bias.mean_average_precision(points, labels), abs=1e-6)


def test_batches_are_balanced():
    _, labels = gaussian_classes(100, 6, noise=1)
    batch = bins.batch_of(labels, np.random.default_rng(0))
    assert len(batch.unique()) == len(batch) == bins.CLASSES_PER_BATCH * bins.PER_CLASS
    assert set(labels[batch].bincount().tolist()) == {0, bins.PER_CLASS}


def test_training_is_a_function_of_its_seed_and_teaches_something():
    points, labels = gaussian_classes(100, 6, noise=1.0)
    points[:, :8] = 6 * torch.randn(len(points), 8, generator=torch.Generator().manual_seed(1))  # half of the axes say nothing
    weights, times = bins.train(points, labels, bins=10, steps=25, seed=0)
    again, _ = bins.train(points, labels, bins=10, steps=25, seed=0)
    assert torch.equal(weights, again)
    assert len(times) == 25
    assert bins.quality(points @ weights, labels)[0] > 2 * bins.quality(points, labels)[0]


def test_the_stand_ins_are_their_definitions():
    points, labels = gaussian_classes(6, 3, noise=1.0)
    unit = torch.nn.functional.normalize(points)
    scores = (unit @ unit.t()).tolist()
    gaps, shares = [], []
    for q, x in itertools.permutations(range(len(labels)), 2):
        if labels[q] != labels[x]:
            continue
        others = [z for z in range(len(labels)) if labels[z] != labels[q]]
        gaps += [learning_curve.MARGIN - scores[q][x] + scores[q][z] for z in others]
        weights = [np.exp(scores[q][z] / learning_curve.TEMPERATURE) for z in range(len(labels)) if z != q]
        shares.append(np.exp(scores[q][x] / learning_curve.TEMPERATURE) / sum(weights))
    violated = [gap for gap in gaps if gap > 0]
    assert float(learning_curve.triplet(points, labels)) == pytest.approx(np.mean(violated), rel=1e-5)
    assert float(learning_curve.supervised_contrastive(points, labels)) == pytest.approx(-np.mean(np.log(shares)), rel=1e-5)


def test_virtual_examples_lie_between_two_of_their_class():
    numbers = virtual_examples.compute()
    for place, label in zip(numbers.virtual, numbers.virtual_labels, strict=True):
        own = numbers.points[numbers.labels == label]
        beside = [abs(np.linalg.det(np.stack([place - a, b - a]))) for a, b in itertools.combinations(own, 2)]
        assert min(beside) < 1e-9
        assert np.linalg.norm(place) < 1
    assert numbers.with_virtual[numbers.sizes.index(4)] == 10
    assert numbers.loss_with_virtual != numbers.loss


def test_neighbours_are_marked_by_their_character(numbers):
    retrieved = numbers["before-after"]
    assert retrieved.pictures.shape[:3] == (2, before_after.QUERIES, 1 + before_after.NEIGHBOURS)
    assert np.array_equal(retrieved.pictures[0, :, 0], retrieved.pictures[1, :, 0])  # the same queries
    assert retrieved.relevant.shape == (2, before_after.QUERIES, before_after.NEIGHBOURS)
    assert 0 < retrieved.recall_at_1[0] < 0.5


def test_components_are_whitened_axes_of_the_training_drawings(monkeypatch):
    from rankgrad.data.glyphs import Glyphs

    def few(split: str) -> Glyphs:
        rng = np.random.default_rng(len(split))
        images = rng.integers(0, 255, (160, 16, 16), dtype=np.uint8)
        return Glyphs(images, np.repeat(np.arange(20), 8), np.zeros(160, np.int64), tuple(map(str, range(20))), ("all",))

    monkeypatch.setattr(figures, "load_glyphs", few)
    (seen, seen_labels), (unseen, _) = figures.glyph_components.__wrapped__()
    assert seen.shape == unseen.shape == (160, figures.COMPONENTS)
    assert seen_labels.tolist() == few("train").labels.tolist()
    torch.testing.assert_close(seen.t() @ seen / len(seen), torch.eye(figures.COMPONENTS), atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def numbers(surface, collapse):
    """What each picture draws, small where the real size takes seconds."""
    points, labels = gaussian_classes(1300, 8, noise=1.1)
    split = (points, labels)
    with pytest.MonkeyPatch.context() as patch:
        for module in (batch_bias, bins, learning_curve):
            patch.setattr(module, "glyph_components", lambda: (split, split))
        return {
            "rambo-landscape": surface,
            "batch-bias": batch_bias.compute(sizes=(16, 128, 256, 1024, 4096), batches=3),
            "margin-collapse": collapse,
            "recall-surrogate": surrogate.compute(),
            "fastap-bins": bins.compute(bins=(1, 5, 10, 50, 400), steps=3, seeds=2, test_classes=20),
            "learning-curve": learning_curve.compute(rates=(1e-3,), steps=4, every=2, seeds=2, test_classes=20),
            "simix": virtual_examples.compute(),
            "before-after": before_after.compute(steps=1),
        }


@pytest.fixture
def quick(numbers, monkeypatch):
    """The command with numbers that are there already."""
    pictures = {name: replace(each, compute=partial(numbers.get, name)) for name, each in pictures_module.PICTURES.items()}
    monkeypatch.setattr(pictures_module, "PICTURES", pictures)


def texts(figure: Figure) -> list[Text]:
    """Every text that is seen."""
    figure.draw_without_rendering()
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title]
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                found += [axis.label, *(label for tick in axis._update_ticks() for label in (tick.label1, tick.label2))]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
@pytest.mark.parametrize("name", pictures_module.PICTURES)
def test_texts_are_large_stay_on_the_slide_and_do_not_touch(name, theme, numbers):
    figure = pictures_module.PICTURES[name].draw(numbers[name], theme)
    seen = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    assert len(seen) > 10
    assert min(text.get_fontsize() for text in texts(figure)) >= 11
    outside = [said for said, box in seen if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1]
    assert not outside
    touching = [(a, b) for (a, box), (b, other) in itertools.combinations(seen, 2) if box.padded(-2).overlaps(other.padded(-2))]
    assert not touching


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_colours_are_seen_on_their_background_and_shades_grow(theme):
    # 3 : 1 is what WCAG 2.2 asks of large text and graphics, 4.5 : 1 of small text
    for colour in (theme.relevant, theme.irrelevant, theme.other, *theme.shades):
        assert contrast(colour, theme.background) > 2.8, colour
    for colour in (theme.ink, theme.muted):
        assert contrast(colour, theme.background) > 4.5, colour
    against = [contrast(shade, theme.background) for shade in theme.shades]
    assert against[1] > 1.5 * against[0]
    assert against[2] > 1.5 * against[1]


def test_drawing_leaves_matplotlibs_settings_alone(numbers, tmp_path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figure = surrogate.draw(numbers["recall-surrogate"], style.DARK)
    style.save(figure, tmp_path / "picture.png", style.DARK)
    assert dict(mpl.rcParams) == before


@pytest.mark.usefixtures("quick")
def test_the_command_writes_pictures_captions_and_numbers(tmp_path, capsys):
    assert draw_figures(["--out", str(tmp_path / "new" / "folder")]) == 0
    folder = tmp_path / "new" / "folder"
    names = list(pictures_module.PICTURES)
    assert capsys.readouterr().out.split() == [str(folder / f"{name}.svg") for name in names]
    assert {path.name for path in folder.iterdir()} == {
        "figures.json",
        *(f"{name}.{kind}" for name in names for kind in ("svg", "txt")),
    }
    written = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert list(written) == names
    for name in names:
        assert (folder / f"{name}.svg").read_text(encoding="utf-8").count("<path") > 50
        assert (folder / f"{name}.txt").read_text(encoding="utf-8").strip() == written[name]["caption"]
        assert len(written[name]["caption"]) > 200
    assert written["fastap-bins"]["numbers"]["bins"] == [1, 5, 10, 50, 400]


@pytest.mark.usefixtures("quick")
def test_numbers_are_those_that_were_drawn(tmp_path, numbers):
    draw_figures(["batch-bias", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["batch-bias"]["numbers"]
    assert written["mean"] == pytest.approx(numbers["batch-bias"].mean, rel=1e-4)
    assert written["full"] == pytest.approx(numbers["batch-bias"].full, rel=1e-4)


@pytest.mark.usefixtures("quick")
def test_pictures_are_added_to_a_folder_and_light_and_dark_stand_side_by_side(tmp_path):
    (tmp_path / "figures.json").write_text("{ damaged", encoding="utf-8")
    draw_figures(["recall-surrogate", "--format", "png", "--out", str(tmp_path)])
    draw_figures(["recall-surrogate", "batch-bias", "--format", "png", "--dark", "--out", str(tmp_path)])
    assert set(json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))) == {"recall-surrogate", "batch-bias"}
    from PIL import Image

    corner = {}
    for ending in ("", "-dark"):
        with Image.open(tmp_path / f"recall-surrogate{ending}.png") as image:
            assert image.height == 1080
            corner[ending] = image.convert("RGB").getpixel((0, 0))
    assert corner == {"": (255, 255, 255), "-dark": (0x14, 0x17, 0x1C)}


@pytest.mark.usefixtures("quick")
def test_the_same_numbers_give_the_same_file(tmp_path):
    for folder in ("first", "second"):
        draw_figures(["margin-collapse", "--out", str(tmp_path / folder)])
    assert (tmp_path / "first" / "margin-collapse.svg").read_bytes() == (
        tmp_path / "second" / "margin-collapse.svg"
    ).read_bytes()


def test_help_lists_every_picture(capsys):
    with pytest.raises(SystemExit, match="0"):
        draw_figures(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and picture.shows in out for name, picture in pictures_module.PICTURES.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch-bais"], "there is no picture 'batch-bais': did you mean 'batch-bias'?"),
        (["xyz"], "there is no picture 'xyz': choose one of rambo-landscape, batch-bias"),
        (["--format", "gif"], "invalid choice: 'gif'"),
    ],
)
def test_wrong_arguments_get_a_hint_and_status_2(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        draw_figures([*arguments, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit, match="2"):
        draw_figures(["--out", str(tmp_path / "file")])
    assert f"--out must be a folder that can be written to, got {tmp_path / 'file'}" in capsys.readouterr().err
