"""The page as a reader gets it: right numbers, nothing from outside, nothing that breaks it."""

import base64
import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report.html_tree import Node, parsed, rows_of
from report.run_folders import copied, make_data, write_journal, write_run, write_test

import rankgrad.report
from rankgrad.cli.show_commands import report
from rankgrad.report.markup import MINUS
from rankgrad.report.page import page
from rankgrad.report.run_reader import read_runs
from rankgrad.report.thumbnails import Thumbnails

HOSTILE = '<script>alert("1")</script>'
SECTIONS = [
    *("numbers", "queries", "confusions", "map", "ranks", "categories"),
    *("learning", "diagnostics", "settings", "hardware", "events"),
]
# what is empty without a file, and then left out
NEEDED = {
    "recipe.json": {"settings"},
    "journal.jsonl": {"learning", "diagnostics", "hardware", "events"},
    "eval/test/result.json": {"categories"},
}
DASH = "\N{EN DASH}"
SCRIPT = (Path(rankgrad.report.__file__).parent / "page.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first", data)


@pytest.fixture(scope="module")
def other(data, run):
    return write_run(run.parent / "second", data, noise=1.4, seed=1, settings={"loss": "smooth-ap", "lr": 3e-4})


@pytest.fixture(scope="module")
def html(run):
    return page(read_runs([run]))


@pytest.fixture(scope="module")
def both(run, other):
    return parsed(page(read_runs([run, other])))


def section(tree: Node, name: str) -> Node:
    return tree.one("section", id=name)


def absent(tree: Node) -> str:
    return " ".join(node.text() for node in tree.all("p", "absent"))


def test_sections_are_there_in_order_and_linked(html):
    tree = parsed(html)
    assert [node.attributes["id"] for node in tree.all("section")] == SECTIONS
    assert [link.attributes["href"] for link in tree.one("nav").all("a")] == [f"#{name}" for name in SECTIONS]
    assert not absent(tree), "a whole run has nothing missing"


def test_numbers_are_those_of_the_result(html, run):
    result = json.loads((run / "eval/test/result.json").read_text())
    header, *rows = rows_of(section(parsed(html), "numbers").all("table")[0])
    assert header == ["metric", "this run", "95% interval", "published", "difference", "source"]
    shown = {row[0]: row[1:] for row in rows}
    assert list(shown) == ["R@1", "R@2", "R@4", "mAP", "mAP@R"]
    for metric, (value, interval, *_) in shown.items():
        low, high = (100 * bound for bound in result["intervals"][metric])
        assert value == f"{100 * result['metrics'][metric]:.1f}"
        assert interval == f"{low:.1f}{DASH}{high:.1f}"
    difference = 100 * result["metrics"]["R@1"] - 62.7
    assert shown["R@1"][2:] == ["62.7", f"{difference:+.1f}".replace("-", MINUS), "FastAP, Table 1 batch 256"]
    assert shown["mAP"][2:] == ["diverged", "", "RaMBO, Table 4"]
    text = section(parsed(html), "numbers").text()
    assert "Protocol all-vs-all: 36 queries." in text
    assert "not tested here: large" in text


def test_other_metrics_are_shown_too(html, run):
    metrics = json.loads((run / "eval/test/result.json").read_text())["metrics"]
    _, *rows = rows_of(section(parsed(html), "ranks").all("table")[0])
    shown = {row[0]: row[1] for row in rows}
    assert shown == {name: f"{100 * value:.1f}" for name, value in metrics.items() if not name.startswith(("R@", "mAP"))}


def test_settings_hardware_and_events_are_told(html):
    tree = parsed(html)
    pairs = {
        pair.all("dt")[0].text(): pair.all("dd")[0].text()
        for name in ("settings", "hardware")
        for pair in section(tree, name).one("dl").all("div")
    }
    assert pairs["loss"] == "fastap"
    assert pairs["lr"] == "0.001"
    assert pairs["ks"] == "1, 2"
    assert pairs["torch"] == "2.15.0"
    assert pairs["gpu"] == "Some GPU"
    assert pairs["train data"] == "1,200 images, 30 classes"
    events = rows_of(section(tree, "events").all("table")[0])[1:]
    assert [row[2:] for row in events] == [
        ["warning", "out of memory at step 12, which is repeated: chunks of 8"],
        ["resume", "resumed on Other GPU"],
        ["end", "finished, after 1 h 2 min"],
    ]


def test_rows_mark_neighbours_of_the_class_by_sign(html, run):
    queries = np.load(run / "eval/test/queries.npz")
    rows = section(parsed(html), "queries").all("div", "found")
    assert len(rows) == 15
    worst = int(queries["first_rank"].max())
    assert f"first relevant at {worst}" in rows[5].text(), "the worst come after five best"
    for row in rows:
        label = row.all("b")[0].text()
        items = row.all("li")
        assert len(items) == 10
        for item in items:
            is_right = item.all("span")[0].text()[1:].strip() == label
            assert item.attributes["class"] == ("right" if is_right else "wrong")
            assert item.all("i")[0].text() == ("✓" if is_right else "✕")
            assert item.all("i")[0].attributes["aria-label"] == ("right" if is_right else "wrong")
    assert any(item.attributes["class"] == "wrong" for row in rows for item in row.all("li"))


def test_every_chart_has_a_title_a_description_and_no_colour_of_its_own(html):
    charts = [node for node in parsed(html).all("svg") if node.attributes.get("role") == "img"]
    assert len(charts) > 10
    for chart in charts:
        assert [child.tag for child in chart.children[:2]] == ["title", "desc"]
        assert all(child.text() for child in chart.children[:2])
        for node in chart.all("path") + chart.all("rect") + chart.all("circle") + chart.all("text"):
            assert not {"fill", "stroke", "style"} & node.attributes.keys(), "themes could not change it"


def test_colours_of_charts_are_in_the_style_sheet(html, both):
    used = {
        name
        for tree in (parsed(html), both)
        for tag in ("path", "rect", "circle", "text", "b")
        for node in tree.all(tag)
        for name in (node.attributes.get("class") or "").split()
        if re.match(r"[fst]-", name)
    }
    style = parsed(html).one("style").text()
    assert used
    assert not {name for name in used if f".{name}" not in style}


def assert_self_contained(html: str) -> None:
    tree = parsed(html)
    for tag in ("link", "iframe", "object", "embed", "base", "form", "video", "audio"):
        assert not tree.all(tag)
    *blocks, script = tree.all("script")
    assert script.text() == SCRIPT, "one script, as it was written"
    for block in blocks:
        assert block.attributes["type"] == "application/json"
        json.loads(block.text())
    nodes = [node for tag in ("img", "a", "svg", "image", "use", "div", "span", "p", "td", "meta") for node in tree.all(tag)]
    for node in nodes:
        for name, value in node.attributes.items():
            assert not name.startswith("on"), f"{node.tag} has a handler: {name}"
            if name in ("src", "href", "srcset", "xlink:href"):
                assert (value or "").startswith(("data:image/webp;base64,", "#")), value
    style = tree.one("style").text()
    assert "url(" not in style
    assert "@import" not in style
    policy = tree.all("meta")[1].attributes
    assert policy["http-equiv"] == "Content-Security-Policy"
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    expected = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy["content"] == expected, "nothing but this very script may run"


def test_the_page_asks_for_nothing(html):
    assert_self_contained(html)
    assert "http:" not in html
    assert "https:" not in html
    assert len(html) < 5e6


def test_hostile_text_stays_text(tmp_path):
    data = make_data(tmp_path / "images", names=(HOSTILE, '"><img src=x onerror=alert(1)>', "a\0b\x1b[31m", "</title></style>"))
    data.category_names[0] = HOSTILE
    folder = write_run(tmp_path / "<b>run & co", data, settings={"trunk": HOSTILE, "loss": "</dd><script>"})
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe |= {"name": HOSTILE, "notes": [HOSTILE]}
    recipe["published"][0]["source"] = '<img src="http://example.org/x.png">'
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "warning", "step": 3, "time": HOSTILE, "message": HOSTILE}) + "\n")
    for folders in ([folder], [folder, copied(folder, tmp_path / "other")]):
        html = page(read_runs(folders))
        assert_self_contained(html)
        tree = parsed(html)
        assert HOSTILE in section(tree, "events").text()
        assert "alert" in section(tree, "queries").text()
        assert '<img src="http://example.org/x.png">' in section(tree, "numbers").text()
    assert "\0" not in html


def test_pictures_stay_within_their_size(run):
    pictures = Thumbnails(max_bytes=30_000)
    tree = parsed(page(read_runs([run]), thumbnails=pictures))
    sizes = [len((node.attributes["src"] or "").partition(",")[2]) for node in tree.all("img")]
    assert 0 < sum(sizes) <= 30_000
    assert pictures.left_out > 50
    assert f"{pictures.left_out} pictures omitted to keep the page small" in section(tree, "missing").text()


def test_pictures_are_small_and_of_the_right_file(run, data):
    tree = parsed(page(read_runs([run])))
    first = tree.all("img")[0]
    path = (first.attributes["alt"] or "").rpartition(", ")[0]
    shown = Image.open(io.BytesIO(base64.b64decode((first.attributes["src"] or "").partition(",")[2]))).convert("RGB")
    original = Image.open(data.root / path).convert("RGB")
    assert max(shown.size) <= 128
    assert np.abs(np.asarray(shown, float) - np.asarray(original.resize(shown.size), float)).mean() < 12


def test_without_pictures_there_are_none(run, tmp_path):
    assert report([str(run), "--no-pictures", "--out", str(tmp_path / "r.html")]) == 0
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img" not in html
    assert "made without pictures" in html
    assert len(parsed(html).all("span", "frame")) > 100


def test_nothing_outside_the_root_becomes_a_picture(run, tmp_path, data):
    (data.root.parent / "secret.png").write_bytes((data.root / data.paths[0]).read_bytes())
    folder = copied(run, tmp_path / "run")
    table = folder / "eval/test/table.csv"
    table.write_text(re.sub(r"class \d+/\d+\.png", "../secret.png", table.read_text()))
    tree = parsed(page(read_runs([folder])))
    assert not tree.all("img")
    assert "must be relative and stay inside its folder" in section(tree, "missing").text()


def test_several_runs_stand_side_by_side(both, run, other):
    first, second = (json.loads((folder / "eval/test/result.json").read_text()) for folder in (run, other))
    results = first["metrics"], second["metrics"]
    header, *rows = rows_of(section(both, "numbers").all("table")[0])
    assert header == ["metric", "first", "second", "published"]
    for row in rows:
        values = [100 * result[row[0]] for result in results]
        low, high = (100 * bound for bound in first["intervals"][row[0]])
        assert row[1].startswith(f"{values[0]:.1f}")
        assert row[1].endswith(f"{low:.1f}{DASH}{high:.1f}")
        assert row[2].startswith(f"{values[1]:.1f}")
        assert ("★" in row[1], "★" in row[2]) == (values[0] >= values[1], values[1] >= values[0])
        assert f"{values[1] - values[0]:+.1f}".replace("-", MINUS) in row[2]
        assert re.search(rf"\[[+{MINUS}]?[\d.]+, [+{MINUS}]?[\d.]+\]$", row[2]), "a paired interval"
    assert "62.7 (FastAP, Table 1)" in rows[0][3]
    settings = rows_of(section(both, "settings").all("table")[0])
    assert settings[1:] == [["loss", "fastap", "smooth-ap"], ["lr", "0.001", "0.0003"]]
    assert [node.attributes["id"] for node in both.all("section")] == [SECTIONS[0], "wins", *SECTIONS[1:]]


def test_curves_of_several_runs_are_named_at_their_ends(both):
    for chart in section(both, "learning").all("figure")[:5]:
        assert {node.text() for node in chart.all("text", "name")} == {"first", "second"}
        dashes = {node.attributes.get("stroke-dasharray") for node in chart.all("path")}
        assert len(dashes) == 2, "told apart without colours too"


def test_won_and_lost_queries_are_counted(both, run, other):
    before, after = (np.load(folder / "eval/test/queries.npz")["first_rank"] for folder in (run, other))
    text = section(both, "wins").text()
    assert f"higher for {(after < before).sum()} quer" in text
    assert f"lower for {(after > before).sum()} of {len(before)}" in text
    assert f"{((before > 1) & (after == 1)).sum()} became right at rank 1" in text
    assert f"{((before == 1) & (after > 1)).sum()} became wrong" in text
    first = section(both, "wins").all("div", "found")[0].text()
    furthest = int(np.argmax(np.log(before) - np.log(after)))
    assert f"rank {before[furthest]:.0f} → {after[furthest]:.0f}" in first


def assert_not_compared(tree: Node, names: tuple[str, str]) -> None:
    """Each run has a table of its own, and no chart, star or difference brings them together."""
    tables = [rows_of(table) for table in section(tree, "numbers").all("table")]
    assert [header[1:2] for header, *_ in tables] == [[name] for name in names]
    assert "Tests are compared only where data, split and protocol are the same." in section(tree, "numbers").text()
    for _, *rows in tables:
        assert not any("★" in cell or "[" in cell for row in rows for cell in row)
    assert section(tree, "wins").text().count("no other run was tested on the same data") == 2
    for chart in section(tree, "ranks").all("figure"):
        assert len(chart.all("path")) <= 1


def test_runs_on_other_data_are_not_compared(run, tmp_path):
    alien = write_run(tmp_path / "alien", make_data(tmp_path / "images", classes=6))
    assert_not_compared(parsed(page(read_runs([run, alien]))), ("first", "alien"))


def with_result(folder: Path, **entries) -> Path:
    """Change entries of result.json."""
    path = folder / "eval/test/result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def test_the_fingerprint_of_the_data_decides_where_there_is_one(run, other, tmp_path):
    def tested(folder: Path, fingerprint: str) -> Path:
        data = {"path": "/data/pets", "fingerprint": fingerprint, "own": True}
        return with_result(copied(folder, tmp_path / f"{folder.name}-{fingerprint}"), data=data)

    first, same, changed = tested(run, "aa"), tested(other, "aa"), tested(other, "bb")
    assert_not_compared(parsed(page(read_runs([first, changed]))), ("first-aa", "second-bb"))
    tables = section(parsed(page(read_runs([first, same]))), "numbers").all("table")
    assert [rows_of(table)[0][1:3] for table in tables] == [["first-aa", "second-aa"]]
    # an older result without a fingerprint is of the run's own data, whose table is the same here
    tables = section(parsed(page(read_runs([first, other]))), "numbers").all("table")
    assert [rows_of(table)[0][1:3] for table in tables] == [["first-aa", "second"]]


def test_another_protocol_is_not_compared(run, other, tmp_path):
    changed = with_result(copied(other, tmp_path / "second"), protocol="query-gallery")
    assert_not_compared(parsed(page(read_runs([run, changed]))), ("first", "second"))


def test_a_test_on_other_data_stands_beside_the_own_one(run, data, tmp_path):
    folder = copied(run, tmp_path / "first")
    shutil.copytree(folder / "eval/test", folder / "eval/test@birds-0a1b2c3d")
    path = folder / "eval/test@birds-0a1b2c3d/result.json"
    told = {"path": "/data/birds", "fingerprint": "0a1b2c3d", "own": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": told}))
    (found,) = read_runs([folder])
    assert found.evaluation("test").key == "test"
    assert found.evaluation(None).key == "test"
    assert found.evaluation("test@birds-0a1b2c3d").data_path == "/data/birds"
    titles = [node.text() for node in section(parsed(page([found])), "numbers").all("h3")]
    assert titles == ["test", "test, other data: /data/birds"]
    own, alien = (rows_of(table)[0] for table in section(parsed(page([found])), "numbers").all("table"))
    assert "published" in own
    assert "published" not in alien, "a paper's number is not for other data"


def test_the_untrained_network_stands_beside_the_trained_one(run, other, data, tmp_path):
    folder = copied(run, tmp_path / "first")
    write_test(folder / "eval/test@untrained", data, data.embeddings(noise=3.0, seed=5))
    path = folder / "eval/test@untrained/result.json"
    before = json.loads(path.read_text()) | {"split": "test", "checkpoint": {"name": "untrained", "step": 0}}
    path.write_text(json.dumps(before))
    tree = parsed(page(read_runs([folder])))
    (table,) = [rows_of(each) for each in section(tree, "numbers").all("table")]
    assert table[0][:4] == ["metric", "this run", "95% interval", "untrained"]
    assert {row[0]: row[3] for row in table[1:]} == {row[0]: f"{100 * before['metrics'][row[0]]:.1f}" for row in table[1:]}
    (shared,) = [rows_of(each) for each in section(parsed(page(read_runs([folder, other]))), "numbers").all("table")]
    assert shared[0][:4] == ["metric", "first", "first (untrained)", "second"]


def test_classes_have_their_names_everywhere(tmp_path):
    data = make_data(tmp_path / "images", names=tuple(str(label) for label in range(9)))
    folder = write_run(tmp_path / "run", data, noise=1.5)
    table = folder / "eval/test/table.csv"
    header, *rows = table.read_text().splitlines()
    breeds = ["beagle", "pug", "boxer"]
    named = [f"{row},{breeds[int(row.split(',')[1])] if int(row.split(',')[1]) < 3 else ''}" for row in rows]
    table.write_text("\n".join([f"{header},class", *named]) + "\n")
    tree = parsed(page(read_runs([folder])))
    for name in ("queries", "confusions", "map"):
        assert "beagle" in section(tree, name).text() or "pug" in section(tree, name).text()
    assert "7" in section(tree, "queries").text(), "a class without a name has its label"


def test_constant_curves_take_no_panel(html):
    titles = [node.text() for node in section(parsed(html), "diagnostics").all("b")]
    assert titles == ["Perfect queries"]
    told = "Constant: pairs with gradient 30.0%, spread 0.5, skipped queries 0, learning rate 0.001."
    assert told in section(parsed(html), "diagnostics").text()


@pytest.mark.parametrize("damage", ["gone", "cut", "nonsense"])
@pytest.mark.parametrize(
    "name",
    [
        "recipe.json",
        "journal.jsonl",
        "eval/test/result.json",
        "eval/test/queries.npz",
        "eval/test/table.csv",
        "eval/test/embeddings.npy",
        "checkpoints/best.json",
    ],
)
def test_what_is_missing_or_damaged_is_said(run, other, tmp_path, name, damage):
    folder = copied(run, tmp_path / "run")
    path = folder / name
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    else:
        path.write_bytes(b"\xff\xfe[1, 2")
    tree = parsed(page(read_runs([folder]), thumbnails=Thumbnails(enabled=False)))
    assert {node.attributes["id"] for node in tree.all("section")} >= set(SECTIONS) - NEEDED.get(name, set())
    # a cut table or a journal may still hold whole lines, and a run without a best checkpoint is a whole run
    if damage == "nonsense" or name not in ("checkpoints/best.json", "eval/test/table.csv", "journal.jsonl"):
        assert Path(name).name in section(tree, "missing").text()
    parsed(page(read_runs([folder, other]), thumbnails=Thumbnails(enabled=False)))


def test_a_run_that_has_not_been_tested(run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_journal(folder / "journal.jsonl", 3, 0)
    tree = parsed(page(read_runs([folder])))
    assert "has not been tested" in section(tree, "numbers").text()
    assert "rankgrad eval" in section(tree, "numbers").text()
    both = parsed(page(read_runs([folder, run])))
    assert "no other run was tested on the same data" in section(both, "wins").text()


def test_images_that_are_gone_leave_frames(tmp_path):
    data = make_data(tmp_path / "images", classes=4)
    folder = write_run(tmp_path / "run", data)
    shutil.rmtree(data.root)
    tree = parsed(page(read_runs([folder])))
    assert not tree.all("img")
    assert len(tree.all("span", "frame")) > 50
    assert "could not be read; the first is class" in section(tree, "missing").text()


def test_an_old_journal_with_words_for_numbers_and_torn_lines(run, tmp_path):
    folder = copied(run, tmp_path / "run")
    lines = [
        {"kind": "step", "step": 1, "loss": "nan"},
        {"kind": "step", "step": 2, "loss": 0.5},
        {"kind": "step", "loss": 0.4},
        {"kind": "eval", "step": 2},
        {"kind": "eval", "step": 2, "split": "validation", "metrics": {"R@1": "inf"}},
        {"kind": "end"},
        {"no": "kind"},
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    tree = parsed(page(read_runs([folder])))
    assert "1 damaged line skipped" in section(tree, "missing").text()
    assert "hardware" not in {node.attributes["id"] for node in tree.all("section")}


def test_one_query_alone(tmp_path):
    data = make_data(tmp_path / "images", classes=3, per_class=2)
    data.is_query, data.is_gallery = [row == 0 for row in range(6)], [row > 0 for row in range(6)]
    folder = write_run(tmp_path / "run", data, options={"neighbours": 3, "ks": (1,)})
    tree = parsed(page(read_runs([folder])))
    assert "1 query." in section(tree, "numbers").text()
    assert len(section(tree, "queries").all("div", "found")) == 1


def test_neighbours_are_found_again_where_they_were_not_kept(run, tmp_path, data):
    folder = copied(run, tmp_path / "run")
    write_test(folder / "eval/test", data, np.load(run / "eval/test/embeddings.npy"), {"ks": (1, 2, 4)})
    rows = [
        [item.all("img")[0].attributes["alt"] for item in section(parsed(page(read_runs([each]))), "queries").all("li")]
        for each in (run, folder)
    ]
    assert rows[0] == rows[1]


def test_random_galleries_have_repeats_and_no_rows(data, tmp_path):
    folder = write_run(tmp_path / "run", data, options={"protocol": "vehicleid-official", "ks": (1, 5)})
    tree = parsed(page(read_runs([folder])))
    assert "between repeats" in section(tree, "numbers").text()
    assert "draws several random galleries" in section(tree, "queries").text()
    assert "Ranks of relevant items" in section(tree, "ranks").text()


def test_a_run_selected_on_its_test_says_so(run, tmp_path):
    folder = copied(run, tmp_path / "run")
    best = folder / "checkpoints/best.json"
    best.write_text(best.read_text().replace('"validation"', '"test"'))
    tree = parsed(page(read_runs([folder])))
    assert "selected on test itself, so the numbers on it are too high" in section(tree, "numbers").all("p", "notice")[0].text()


def test_a_debug_run_is_compared_with_nothing(data, tmp_path):
    folder = write_run(tmp_path / "run", data, debug=True)
    text = section(parsed(page(read_runs([folder]))), "numbers").text()
    assert "its numbers mean nothing" in text
    assert "62.7" not in text


def test_the_same_run_gives_the_same_page(run, html):
    assert page(read_runs([run])) == html


def test_a_test_of_embeddings_and_a_run_of_fit_miss_nothing(run, tmp_path):
    folder = copied(run, tmp_path / "run")
    (folder / "recipe.json").unlink()
    journal = folder / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[0] = {"kind": "start", "step": 0, "settings": {"lr": 0.25, "seed": 3}}
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = parsed(page(read_runs([folder])))
    found = {node.attributes["id"] for node in tree.all("section")}
    assert "missing" not in found
    assert "0.25" in section(tree, "settings").text()
    assert "36 embeddings of 8 dimensions, seed 3" in tree.one("header").text()
    journal.unlink()
    shutil.rmtree(folder / "checkpoints")
    tree = parsed(page(read_runs([folder])))
    assert [node.attributes["id"] for node in tree.all("section")] == SECTIONS[:6]
    assert "36 embeddings of 8 dimensions" in tree.one("header").text()
