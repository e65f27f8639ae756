"""`rankgrad report` as it is called, also on a run that the library trained itself, and in a browser."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_datasets
import pytest
from report.html_tree import parsed
from report.run_folders import make_data, write_run

from rankgrad.cli.show_commands import report
from rankgrad.report.run_reader import names_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    top = tmp_path_factory.mktemp("command")
    data = make_data(top / "images")
    return [write_run(top / name, data, seed=seed) for seed, name in enumerate(("first", "a-run-with-a-very-long-name" * 3))]


@pytest.fixture
def run(runs):
    return runs[0]


def test_writes_one_file_and_says_where(run, tmp_path, capsys):
    out = tmp_path / "made" / "page.html"
    assert report([str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} ({out.stat().st_size / 1e6:.1f} MB)\n"
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert parsed(out.read_text(encoding="utf-8")).one("h1").text() == "first"


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (["nowhere"], FileNotFoundError, "nowhere does not exist: give a run folder"),
        (["empty"], ValueError, "empty is not a run folder: it has none of recipe.json, journal.jsonl, eval"),
        (["first", "first"], ValueError, "first was given twice: give each run once"),
        (["first", "--split", "tset"], ValueError, "--split must be a split that was tested, got 'tset': choose one of test"),
        (["first", "--out", "empty"], IsADirectoryError, "--out must be a file, got the folder empty"),
    ],
)
def test_wrong_arguments_are_answered_in_a_sentence(run, tmp_path, monkeypatch, arguments, error, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(run, tmp_path / "first")
    with pytest.raises(error, match=complaint.replace("(", r"\(")):
        report(arguments)
    assert not (tmp_path / "report.html").exists()


def test_the_page_follows_the_umask_and_leftovers_of_a_killed_report_go(run, tmp_path):
    code = "import os, sys; from rankgrad import cli; os.fsync = lambda _: os.kill(os.getpid(), 9); cli.main(sys.argv[1:])"
    out = tmp_path / "page.html"
    killed = subprocess.run([sys.executable, "-c", code, "report", str(run), "--no-pictures", "--out", str(out)], check=False)
    assert killed.returncode == -9
    assert [path.name.startswith(".writing-") for path in tmp_path.iterdir()] == [True]
    before = os.umask(0o027)
    try:
        assert report([str(run), "--no-pictures", "--out", str(out)]) == 0
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert out.stat().st_mode & 0o777 == 0o640


def test_runs_of_one_name_are_told_apart_by_their_folders():
    assert names_of([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names_of([Path("/a/x/run"), Path("/a/x/other")]) == ["run", "other"]
    assert names_of([Path("/run")]) == ["run"]


def test_a_run_that_the_library_trained(tmp_path, capsys):
    from rankgrad.cli.train_commands import train

    root = fake_datasets.build("omniglot", tmp_path / "omniglot", classes=6, per_class=4)
    folder = tmp_path / "run"
    common = ["--data", str(root), "--device", "cpu", "--cache", "none", "--no-tensorboard"]
    assert train(["omniglot-fastap", "--debug", *common, "--validation", "half", "--out", str(folder)]) == 0
    capsys.readouterr()
    out = tmp_path / "report.html"
    assert report([str(folder), "--out", str(out)]) == 0
    tree = parsed(out.read_text(encoding="utf-8"))
    assert not tree.all("p", "absent"), [node.text() for node in tree.all("p", "absent")]
    assert not [node for node in tree.all("section") if node.attributes["id"] == "missing"]
    assert len(tree.all("img")) > 50
    assert "fastap on omniglot" in tree.one("header").text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser(runs, tmp_path):
    """Nothing asked for, nothing wider than a telephone, and dark where dark is wanted."""
    api = pytest.importorskip("playwright.sync_api")
    out = tmp_path / "report.html"
    report([*map(str, runs), "--out", str(out)])
    asked: list[str] = []
    complaints: list[str] = []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        grounds = {}
        for width, scheme in ((390, "light"), (1280, "dark")):
            view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            view.on("request", lambda request: asked.append(request.url))
            view.on("console", lambda message: complaints.append(message.text))
            view.goto(out.as_uri())
            assert view.evaluate("document.documentElement.scrollWidth") == width
            assert view.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            grounds[scheme] = view.evaluate("getComputedStyle(document.body).backgroundColor")
            assert len(view.screenshot()) > 10_000
        browser.close()
    assert [url for url in asked if not url.startswith("data:")] == [out.as_uri()] * 2
    assert not complaints
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}


def test_needs_no_drawing_library(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert report([str(run), "--out", str(tmp_path / "r.html")]) == 0
    assert "two principal components" in (tmp_path / "r.html").read_text(encoding="utf-8")
