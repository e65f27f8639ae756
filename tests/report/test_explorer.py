"""The page as it is explored: the data behind it; in a browser filters, enlarged pictures, followed neighbours and maps."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report.html_tree import Node, parsed
from report.run_folders import make_data, write_run

from rankgrad.report import explorer as explorer_module
from rankgrad.report.page import page
from rankgrad.report.run_reader import ItemTable, read_runs
from rankgrad.report.thumbnails import SIZES, Thumbnails

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    top = tmp_path_factory.mktemp("explorer")
    data = make_data(top / "images", classes=12, per_class=5, names=(HOSTILE,))
    return [write_run(top / f"run-{seed}", data, noise=1.5, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def gallery_run(tmp_path_factory):
    top = tmp_path_factory.mktemp("gallery")
    return write_run(top / "run", make_data(top / "images", classes=12, per_class=5, gallery=True), noise=1.5)


def data_of(tree: Node, name: str):
    return json.loads(tree.one("script", id=f"data-{name}").text())


def test_every_query_is_there_with_its_neighbours_and_its_ranks(runs):
    tree = parsed(page(read_runs(runs)))
    (group,) = data_of(tree, "explorer")["groups"]
    assert [run["name"] for run in group["runs"]] == ["run-0", "run-1"]
    assert group["queries"] == 60
    for folder, run in zip(runs, group["runs"], strict=True):
        kept = np.load(folder / "eval/test/queries.npz")
        k = run["k"]
        assert k == 10
        for item, row in enumerate(group["rows"]):
            (query,) = np.flatnonzero(kept["index"] == row)
            assert run["first"][item] == kept["first_rank"][query]
            assert run["ap"][item] == pytest.approx(100 * kept["average_precision"][query], abs=0.051)
            near = [group["rows"][other] for other in run["near"][item * k : (item + 1) * k]]
            assert near == kept["neighbours"][query][:k].tolist()
            scores = run["scores"][item * k : (item + 1) * k]
            np.testing.assert_allclose(scores, 1000 * kept["scores"][query][:k], atol=0.51)
    first = group["runs"][0]["first"]
    assert first == sorted(first, reverse=True), "thumbnails of the worst are made first"


def test_thumbnails_lie_one_after_another(runs):
    tree = parsed(page(read_runs(runs[:1])))
    (group,) = data_of(tree, "explorer")["groups"]
    text = data_of(tree, "thumbnails-0")
    assert group["ends"][-1] == len(text)
    for begin, end in zip([0, *group["ends"]], group["ends"], strict=False):
        image = Image.open(io.BytesIO(base64.b64decode(text[begin:end])))
        assert max(image.size) <= SIZES[0][0]


def test_items_of_a_gallery_have_neighbours_too(gallery_run):
    (run,) = read_runs([gallery_run])
    (group,) = data_of(parsed(page([run])), "explorer")["groups"]
    test = run.evaluation(None)
    assert len(group["rows"]) > group["queries"]
    lists = group["runs"][0]
    assert len(lists["near"]) == len(group["rows"]) * lists["k"]
    unit = np.array(test.embeddings)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    item = group["queries"]  # the first that is no query
    row = group["rows"][item]
    scores = np.where(test.table.is_gallery, unit @ unit[row], -np.inf)
    scores[row] = -np.inf
    near = [group["rows"][other] for other in lists["near"][item * lists["k"] : (item + 1) * lists["k"]] if other >= 0]
    assert near[0] == int(np.argmax(scores))


def test_tests_on_other_data_are_explored_apart(runs, gallery_run):
    groups = data_of(parsed(page(read_runs([runs[0], gallery_run]))), "explorer")["groups"]
    assert [[run["name"] for run in group["runs"]] for group in groups] == [["run-0"], ["run"]]
    assert not set(groups[0]["tables"]) & set(groups[1]["tables"])


def test_too_many_queries_are_the_worst_and_some_others(runs, monkeypatch):
    monkeypatch.setattr(explorer_module, "MAX_QUERIES", 20)
    (group,) = data_of(parsed(page(read_runs(runs[:1]))), "explorer")["groups"]
    assert group["queries"] == 20
    assert "of 60 queries" in group["note"]
    every = np.load(runs[0] / "eval/test/queries.npz")["first_rank"]
    assert sorted(group["runs"][0]["first"][:10], reverse=True) == sorted(every, reverse=True)[:10]


def test_thumbnails_shrink_until_they_fit(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (6, 400, 400, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    every = np.ones(6, dtype=np.bool_)
    table = ItemTable("t", tmp_path, tuple(f"{number}.png" for number in range(6)), ("0",) * 6, ("",) * 6, every, every)
    rows = list(range(6))
    large = sum(len(each) for each in Thumbnails().encode_all(table, rows, 10**7))
    few = Thumbnails().encode_all(table, rows, large // 4)
    assert all(few), "smaller, not fewer"
    assert sum(map(len, few)) <= large // 4
    thumbnails = Thumbnails()
    assert not all(thumbnails.encode_all(table, rows, 500))
    assert thumbnails.left_out > 0


def test_a_label_cannot_end_the_data(runs):
    html = page(read_runs(runs))
    tree = parsed(html)
    assert HOSTILE in data_of(tree, "explorer")["groups"][0]["classes"]
    assert HOSTILE not in html


def test_without_a_script_the_examples_are_shown(runs):
    tree = parsed(page(read_runs(runs[:1])))
    assert "hidden" in tree.one("div", id="explorer").attributes
    (static,) = tree.all("div", "static")
    assert "hidden" not in static.attributes
    assert len(static.all("div", "found")) == 15


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser, path: Path, **options):
    view = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
    view.complaints = []
    view.on("console", lambda message: view.complaints.append(message.text))
    view.on("pageerror", lambda error: view.complaints.append(str(error)))
    view.goto(path.as_uri())
    return view


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(read_runs(runs[:1])), encoding="utf-8")
    return path


def test_queries_are_filtered(browser, written, runs):
    view = opened(browser, written)
    kept = np.load(runs[0] / "eval/test/queries.npz")
    status = view.locator("#explorer [role=status]")
    assert view.locator(".static").is_hidden()
    assert status.inner_text().startswith("60 queries of 60")
    ranks = [
        int(text.split("first relevant at ")[1].split(",")[0]) for text in view.locator("#explorer .query").all_inner_texts()
    ]
    assert ranks == sorted(kept["first_rank"].tolist(), reverse=True)[:8], "wrong first"
    shown = view.locator("#explorer .found")
    assert shown.count() == 8
    view.get_by_role("button", name="Show more").click()
    assert shown.count() == 16
    view.get_by_label("Show", exact=True).select_option("Wrong at rank 1")
    wrong = int((kept["first_rank"] > 1).sum())
    assert status.inner_text().startswith(f"{wrong} quer")
    view.get_by_label("Show", exact=True).select_option("All")
    view.get_by_label("Class").select_option("7")
    assert status.inner_text().startswith("5 queries of 60")
    view.get_by_label("Class").select_option("All classes")
    view.get_by_label("File name").fill("class 3/2")
    view.locator("#explorer [role=status]", has_text="1 query of 60").wait_for()
    assert not view.complaints


def test_a_picture_is_enlarged_and_its_neighbours_followed(browser, written):
    view = opened(browser, written)
    dialog = view.locator("dialog.viewer")
    view.locator("#explorer .found li button.pic").nth(2).click()
    first = dialog.locator(".facts p").first.inner_text()
    assert dialog.locator(".item img").bounding_box()["width"] > 300
    dialog.locator("li button.pic").nth(1).click()
    second = dialog.locator(".facts p").first.inner_text()
    assert second != first
    dialog.get_by_role("button", name="Back").click()
    assert dialog.locator(".facts p").first.inner_text() == first
    view.keyboard.press("Escape")
    assert dialog.is_hidden()
    view.locator("#confusions img").first.click()
    assert dialog.is_visible()
    assert not view.complaints


def test_points_of_the_map_tell_class_and_show_a_picture(browser, written):
    view = opened(browser, written)
    point = view.locator(".dots svg circle[data-item]").nth(7)
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    tip = view.locator(".tip")
    assert tip.is_visible()
    assert tip.locator("img").evaluate("image => image.naturalWidth") > 0
    assert tip.locator("b").inner_text()
    assert 0 < view.locator("circle.picked").count() <= 5
    point.click(force=True)
    assert view.locator("dialog.viewer").is_visible()
    assert not view.complaints


def test_pictures_are_large_on_a_wide_screen_and_nothing_is_wider_than_a_phone(browser, written):
    wide = opened(browser, written)
    sizes = wide.eval_on_selector_all("#explorer li img, #confusions img", "all => all.map(image => image.clientWidth)")
    assert min(sizes) >= 120
    view = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark").new_page()
    view.goto(written.as_uri())
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    view.locator("#explorer .found button.pic").first.click()
    assert view.evaluate("document.documentElement.scrollWidth") == 390


def test_a_page_without_javascript_shows_the_examples(browser, written):
    view = opened(browser, written, java_script_enabled=False)
    assert view.locator(".static .found").count() == 15
    assert view.locator(".static").is_visible()
    assert view.locator("#explorer").is_hidden()


def test_several_runs_stay_readable(browser, runs, tmp_path):
    path = tmp_path / "both.html"
    path.write_text(page(read_runs(runs)), encoding="utf-8")
    view = opened(browser, path)
    assert view.locator("#explorer .found").first.locator(".strip").count() == 2
    assert view.evaluate("document.documentElement.scrollHeight") < 12_000
    assert not view.complaints
