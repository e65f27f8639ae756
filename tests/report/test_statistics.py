"""Numbers behind the charts, against counting by hand."""

import numpy as np
import pytest
from report.html_tree import parsed
from report.run_folders import make_data, write_run

from rankgrad.report.charts import LINE, Bar, Dot, Series, bars, histogram, line, scatter
from rankgrad.report.comparison import column_of, differences, wins_and_losses
from rankgrad.report.examples import confusions
from rankgrad.report.learning_curves import thinned
from rankgrad.report.markup import MINUS, NOTHING, cut_middle, number, signed
from rankgrad.report.rank_statistics import bin_names, cut_offs, hit_rates, rank_statistics
from rankgrad.report.retrieval_sections import project
from rankgrad.report.run_reader import read_runs
from rankgrad.report.svg import BOTTOM, HEIGHT, TOP, WIDTH, Scale, log_ticks, round_ticks, span

DASH = "\N{EN DASH}"


def ranks_by_hand(data, embeddings):
    """The sorted ranks of each query's relevant items; irrelevant candidates win ties."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    scores = unit @ unit.T
    items = range(len(data.labels))
    is_query = data.is_query or [True] * len(items)
    is_gallery = data.is_gallery or [True] * len(items)
    lists = []
    for query in items:
        candidates = [i for i in items if is_gallery[i] and i != query]
        good = [i for i in candidates if data.labels[i] == data.labels[query]]
        bad = [i for i in candidates if data.labels[i] != data.labels[query]]
        if is_query[query] and good:
            ahead = sorted(sum(scores[query, b] >= scores[query, g] for b in bad) for g in good)
            lists.append([place + count for place, count in enumerate(ahead, start=1)])
    return lists


@pytest.fixture(scope="module", params=[False, True], ids=["all-vs-all", "query-gallery"])
def tested(request, tmp_path_factory):
    top = tmp_path_factory.mktemp("counts")
    data = make_data(top / "images", classes=12, per_class=5, gallery=request.param)
    run = write_run(top / "a", data, noise=1.5)
    other = write_run(top / "b", data, noise=1.9, seed=3)
    return data, *(each.evaluation("test") for each in read_runs([run, other]))


def test_ranks_of_all_relevant_items(tested):
    data, evaluation, _ = tested
    lists = ranks_by_hand(data, np.asarray(evaluation.embeddings))
    found = rank_statistics(evaluation)
    assert found.queries == found.of == len(lists)
    everywhere = [rank for each in lists for rank in each]
    at_best = [place for each in lists for place in range(1, len(each) + 1)]
    for bins, values in ((found.ranks, everywhere), (found.ideal, at_best)):
        by_hand = [0] * len(bins)
        for value in values:
            place = 0
            while 2**place < value:
                place += 1
            by_hand[place] += 1
        assert bins.tolist() == by_hand
    at_half = np.mean([np.ceil(len(each) / 2) / each[int(np.ceil(len(each) / 2)) - 1] for each in lists])
    at_end = np.mean([len(each) / each[-1] for each in lists])
    np.testing.assert_allclose(found.precision[[49, 99]], [at_half, at_end])


def test_a_sample_is_part_of_the_whole_and_says_so(tested):
    _, evaluation, _ = tested
    some, every = rank_statistics(evaluation, most=7), rank_statistics(evaluation)
    assert (some.queries, some.of) == (7, every.of)
    padded = np.pad(some.ranks, (0, len(every.ranks) - len(some.ranks)))
    assert (padded <= every.ranks).all()


def test_hit_rates_are_the_metric(tested):
    _, evaluation, _ = tested
    found = hit_rates(evaluation.first_rank, np.array([1, 2, 4]))
    np.testing.assert_allclose(found, [evaluation.metrics[f"R@{k}"] for k in (1, 2, 4)])


def test_cut_offs_ascend_from_1_to_the_end():
    for highest in (1, 2, 7, 60_000):
        ks = cut_offs(highest)
        assert ks[0] == 1
        assert ks[-1] == max(highest, 2)
        assert (np.diff(ks) > 0).all()


def test_differences_are_paired(tested):
    _, first, other = tested
    found = differences(first, other, list(first.metrics))
    assert found.keys() == first.metrics.keys()
    for metric, difference in found.items():
        assert difference.mean == pytest.approx(other.metrics[metric] - first.metrics[metric])
        assert difference.low <= difference.mean <= difference.high
    # the same queries are drawn for both, so a run differs from itself by nothing at all
    assert {(each.low, each.high) for each in differences(first, first, list(first.metrics)).values()} == {(0.0, 0.0)}


def test_wins_and_losses_are_antisymmetric(tested):
    _, first, other = tested
    there, back = wins_and_losses(first, other), wins_and_losses(other, first)
    assert set(there.won.tolist()) == set(back.lost.tolist())
    assert set(there.lost.tolist()) == set(back.won.tolist())
    assert (there.won_first, there.lost_first) == (back.lost_first, back.won_first)
    gain = np.log(first.first_rank / other.first_rank)
    assert (np.diff(gain[there.won]) <= 0).all(), "the furthest first"
    assert (np.diff(gain[there.lost]) >= 0).all()


def test_confusions_are_the_wrong_first_answers(tested):
    data, evaluation, _ = tested
    pairs, mistakes, within = confusions(evaluation, most=10_000)
    wrong = [
        (query, answer)
        for query, answer in zip(evaluation.index, evaluation.queries["neighbours"][:, 0], strict=True)
        if data.labels[query] != data.labels[answer]
    ]
    assert mistakes == len(wrong) > 0
    assert within == sum(data.categories[q] == data.categories[a] for q, a in wrong)
    counted = [
        sum({f"class {data.labels[q]}", f"class {data.labels[a]}"} == set(pair.labels) for q, a in wrong) for pair in pairs
    ]
    assert [pair.mistakes for pair in pairs] == counted
    assert sum(counted) == mistakes
    assert counted == sorted(counted, reverse=True)


@pytest.mark.parametrize(
    ("metric", "column"),
    [
        ("R@10", "hit@10"),
        ("mAP", "average_precision"),
        ("mAP@R", "average_precision_at_r"),
        ("recall@4", "recall@4"),
        ("P@4", "precision@4"),
        ("mAP[hard]", "average_precision[hard]"),
        ("mP@5[easy]", "precision@5[easy]"),
    ],
)
def test_columns_behind_metrics(metric, column):
    assert column_of(metric) == column


def test_names_of_bins():
    assert bin_names(5) == ["1", "2", f"3{DASH}4", f"5{DASH}8", f"9{DASH}16"]


def test_principal_components_are_those_of_the_unit_vectors():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20, 5)).astype(np.float32)
    places, method = project(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    centred = unit - unit.mean(axis=0)
    values, directions = np.linalg.eigh(centred.T @ centred)
    np.testing.assert_allclose(np.abs(places), np.abs(centred @ directions[:, [-1, -2]]), atol=1e-5)
    assert method == f"two principal components, {100 * values[-2:].sum() / values.sum():.0f}% of the variance"
    np.testing.assert_array_equal(project(vectors)[0], places)


@pytest.mark.parametrize("vectors", [np.ones((4, 3)), np.eye(3, 1) + 1, np.zeros((5, 2))], ids=["equal", "line", "zero"])
def test_collapsed_embeddings_have_a_map_too(vectors):
    places, _ = project(vectors.astype(np.float32))
    assert places.shape == (len(vectors), 2)
    assert np.isfinite(places).all()


def test_thinned_curves_keep_their_mean():
    x, y = thinned(list(range(1000)), list(np.arange(1000.0) ** 2), most=100)
    assert len(x) == 100
    assert np.mean(y) == pytest.approx(np.mean(np.arange(1000.0) ** 2))
    assert thinned([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_ticks_are_round_and_inside():
    assert round_ticks(0.0, 1.0, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert round_ticks(-0.03, 0.31, 4) == [0, 0.1, 0.2, 0.3]
    assert log_ticks(1, 1000, 6) == [1, 10, 100, 1000]
    assert log_ticks(1, 8, 6) == [1, 2, 5]
    assert len(log_ticks(1, 1e12, 6)) <= 6


def test_spans_have_a_length_and_begin_below_nought_only_where_values_do():
    assert span([]) == (0, 1)
    assert span([0, 0]) == (0, 0.5)
    assert span([3, 3, float("nan")]) == (1.5, 4.5)
    assert span([-1, 1], room=0.1) == pytest.approx((-1.2, 1.2))


def test_scales_go_from_end_to_end():
    assert [Scale(0, 10, 5, 25)(value) for value in (0, 5, 10)] == [5, 15, 25]
    assert [round(Scale(1, 100, 0, 10, log=True)(value), 9) for value in (1, 10, 100)] == [0, 5, 10]


CURVES = {
    "nothing": ([], []),
    "one point": ([3], [0.5]),
    "a constant": ([1, 2, 3], [0, 0, 0]),
    "gaps": ([1, 2, 3, 4, 5], [1, float("nan"), 2, float("inf"), 3]),
    "huge": ([1, 2], [1e12, -1e12]),
    "tiny": ([1, 2], [1e-9, 2e-9]),
}


@pytest.mark.parametrize("points", CURVES.values(), ids=CURVES)
def test_lines_of_any_values_stay_inside(points):
    tree = parsed(line([Series("curve", *points)], title="t", x="x", y="y"))
    text = tree.one("path").attributes["d"]
    known = [value for value in points[1] if np.isfinite(value)]
    assert text.count("M") + text.count("L") == len(known)
    coordinates = [float(value) for value in text.replace("M", " ").replace("L", " ").split()]
    assert all(0 <= value <= WIDTH for value in coordinates[::2])
    assert all(0 <= value <= HEIGHT for value in coordinates[1::2])
    if points is CURVES["gaps"]:
        assert text.count("M") == 3


def test_higher_values_are_drawn_higher():
    tree = parsed(line([Series("", [1, 10, 100], [0.1, 0.2, 0.9])], title="t", x="k", y="y", log_x=True, percent=True))
    points = [tuple(map(float, pair.split())) for pair in tree.one("path").attributes["d"][1:].split("L")]
    assert points[0][1] > points[1][1] > points[2][1]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.11)
    tips = [node.text() for node in tree.all("title")]
    assert "k 10\n: 20.0%" in tips


@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
def test_names_at_the_ends_do_not_touch_and_stay_inside(at):
    series = [Series(f"run {i}", [1, 2], [0.5, at + i * 1e-4]) for i in range(6)]
    tree = parsed(line(series, title="t", x="x", y="y", floor=0, ceiling=1))
    heights = sorted(float(node.attributes["y"]) for node in tree.all("text", "name"))
    assert len(heights) == 6
    assert min(np.diff(heights)) >= LINE - 0.11
    assert heights[0] >= TOP
    assert heights[-1] <= HEIGHT - BOTTOM + LINE


def test_bars_are_as_long_as_their_values():
    rows = [Bar("a", [0.5], "5 queries"), Bar("b", [0.25], "1 query"), Bar("none", [float("nan")], "")]
    tree = parsed(bars(rows, ["run"], title="t"))
    widths = [float(node.attributes["width"]) for node in tree.all("rect")]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.11)
    assert "a: 50.0, 5 queries" in tree.text()
    dots = parsed(bars([Bar("a", [0.5, 0.6])], ["x", "y"], title="t", colours=["accent", "wrong"]))
    assert len([node for node in dots.all("circle") if node.attributes["r"] == "5" and node.attributes["cy"] != "5"]) == 2


def test_histograms_are_as_high_as_their_shares():
    tree = parsed(
        histogram(["1", "2"], [Series("a", [0, 1], [0.2, 0.4])], title="t", x="x", y="y", marks=[0.3, 0.0], mark_name="m")
    )
    heights = [float(node.attributes["height"]) for node in tree.all("rect")]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.11)
    assert len([node for node in tree.all("line", "level") if node.all("title")]) == 1, "no mark at nothing"


def test_scatters_put_points_on_their_diagonal():
    tree = parsed(scatter([Dot(0.2, 0.2, "ink"), Dot(0.8, 0.8, "ink")], title="t", x="x", y="y", diagonal=True))
    diagonal = tree.one("line", **{"class": "mark"}).attributes
    slope = (float(diagonal["y2"]) - float(diagonal["y1"])) / (float(diagonal["x2"]) - float(diagonal["x1"]))
    for dot in tree.all("circle"):
        expected = float(diagonal["y1"]) + slope * (float(dot.attributes["cx"]) - float(diagonal["x1"]))
        assert float(dot.attributes["cy"]) == pytest.approx(expected, abs=0.2)


def test_numbers_are_short():
    assert [number(value) for value in (1200, 0.12345, -3.5, 12345.678, float("nan"))] == [
        "1,200",
        "0.1235",
        f"{MINUS}3.5",
        "12,346",
        NOTHING,
    ]
    assert [signed(value) for value in (1.25, -0.04, -4.2)] == ["+1.2", "0.0", f"{MINUS}4.2"]
    assert cut_middle("abcdefghij", 5) == "ab…ij"
    assert cut_middle("abc", 5) == "abc"
