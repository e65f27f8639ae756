"""The page in a real Chromium, served by a real process."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
SERVE = "import sys; from rankgrad.cli.search_commands import main_serve; sys.exit(main_serve(sys.argv[1:]))"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def address(run_folder, searcher) -> Iterator[str]:
    command = [sys.executable, "-c", SERVE, str(run_folder), "--index", str(searcher.gallery.folder), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "searches 30 images; press Ctrl-C to stop" in said
        yield said.split()[0]
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser, address):
    """A tab on the page that notes what it asks for and what goes wrong in it."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    opened.asked, opened.wrong = [], []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda message: opened.wrong.append(message.text) if message.type == "error" else None)
    opened.set_default_timeout(15_000)
    opened.goto(address)
    opened.wait_for_selector("#items .tile")
    yield opened
    context.close()


def until(tab, expression: str) -> None:
    """Waits for a JavaScript expression to be true; playwright's own way is kept out by the page's security policy."""
    deadline = time.monotonic() + 15
    while not tab.evaluate(expression):
        assert time.monotonic() < deadline, expression
        tab.wait_for_timeout(20)


def drop(tab, name: str, content: bytes) -> None:
    transfer = tab.evaluate_handle(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(content)], name));
            return transfer;
        }""",
        [name, list(content)],
    )
    tab.dispatch_event(".drop", "drop", {"dataTransfer": transfer})


def labels(tab) -> list[str]:
    tab.wait_for_selector("#results:not([aria-busy]) .score")
    return tab.locator("#results .label").all_inner_texts()


def test_an_image_is_dropped_and_a_result_followed_and_back(tab, address, data: Path):
    assert tab.inner_text("#run") == "tiny"
    assert tab.locator("#numbers dd").all_inner_texts() == ["30", "5", "16", "flat"]
    drop(tab, "mine.png", (data / "test" / "class-006" / "3.png").read_bytes())
    assert labels(tab)[0] == "class-006"
    assert tab.inner_text("#query-label") == "mine.png"
    assert tab.locator("#results .score").first.inner_text() == "1.000"
    assert tab.locator("#results .mark").count() == 0
    assert "24 images found" in tab.inner_text("#status")

    tab.locator("#results .tile").nth(0).click()
    until(tab, "document.getElementById('query-kind').textContent === 'From the gallery'")
    tab.wait_for_selector("#results .mark")
    assert tab.inner_text("#query-name") == "class-006/3.png"
    assert tab.locator("#results .right").count() + tab.locator("#results .wrong").count() == 24
    for tile, label in zip(tab.locator("#results .tile").all(), labels(tab), strict=True):
        assert ("right" in tile.get_attribute("class")) == (label == "class-006")
    second = tab.locator("#results .tile").nth(1).get_attribute("href")

    tab.go_back()
    until(tab, "document.getElementById('query-label').textContent === 'mine.png'")
    tab.go_forward()
    until(tab, "document.getElementById('query-name').textContent === 'class-006/3.png'")
    assert tab.locator("#results .tile").nth(1).get_attribute("href") == second
    tab.reload()
    tab.wait_for_selector("#results .mark")
    assert tab.inner_text("#query-name") == "class-006/3.png"

    # pictures arrived, nothing failed, and nobody else was asked
    until(tab, "[...document.querySelectorAll('#results img')].slice(0, 12).every((image) => image.naturalWidth > 0)")
    assert not tab.wrong
    assert {urlsplit(url).netloc for url in tab.asked if not url.startswith("blob:")} == {urlsplit(address).netloc}
    assert len(tab.asked) > 30


def test_a_bad_file_is_answered_on_the_page(tab, data: Path):
    drop(tab, "photo.jpg", b"this is text")
    tab.wait_for_selector("#problem:not([hidden])")
    assert tab.inner_text("#problem").startswith("Unsupported image.")
    assert not tab.is_visible("#found")
    drop(tab, "big.jpg", b"\xff\xd8\xff" + bytes(1_000))
    until(tab, "document.getElementById('problem').textContent.includes('JPEG file is damaged')")
    # and the next good one is searched with
    tab.set_input_files("#file", data / "test" / "class-008" / "0.png")
    assert labels(tab)[0] == "class-008"
    assert not tab.is_visible("#problem")


def test_the_keyboard_is_enough(tab):
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "file"
    # what opens the system's dialog, which would not close again
    tab.evaluate("() => { document.activeElement.onclick = (event) => { event.preventDefault(); window.opened = true; }; }")
    tab.keyboard.press("Enter")
    until(tab, "window.opened === true")
    tab.locator("#items .tile").first.focus()
    tab.keyboard.press("Enter")
    assert len(labels(tab)) == 24
    name = tab.locator("#results .tile").first.get_attribute("aria-label")
    assert name.startswith("Rank 1: class-")
    assert "label. Search from it" in name


def test_the_gallery_is_searched_by_label_and_shuffled(tab):
    shown = "[...document.querySelectorAll('#items .tile')].map((tile) => tile.hash).join()"
    before = tab.evaluate(shown)
    tab.click("#shuffle")
    until(tab, f"{shown} !== '{before}'")
    tab.fill("#label", "class-009")
    until(tab, "document.querySelectorAll('#items .tile').length === 6")
    assert set(tab.locator("#items .label").all_inner_texts()) == {"class-009"}
    assert not tab.is_visible("#more")
    tab.fill("#label", "nobody")
    tab.wait_for_selector("#none:not([hidden])")
    assert tab.inner_text("#none") == "No label contains “nobody”."


def test_names_are_readable_in_full(tab):
    tab.locator("#items .tile").first.click()
    labels(tab)
    tile = tab.locator("#results .tile").first
    label, name = tile.locator(".label").inner_text(), tile.locator(".file-name").inner_text()
    category, path = tile.get_attribute("title").split("\n")
    assert category == label
    assert path == f"{label}/{name}"


def test_number_and_label_of_the_results_are_chosen_and_stay(tab):
    tab.locator("#items .tile").first.click()
    assert len(labels(tab)) == 24
    tab.select_option("#count", "12")
    until(tab, "document.querySelectorAll('#results .score').length === 12")
    assert tab.evaluate("location.hash").endswith("&k=12")
    tab.fill("#only", "CLASS-008")
    until(tab, "location.hash.includes('label=CLASS-008')")
    until(tab, "[...document.querySelectorAll('#results .label')].every((label) => label.textContent === 'class-008')")
    assert 5 <= len(labels(tab)) <= 6
    tab.locator("#results .tile").nth(2).click()
    until(tab, "document.querySelectorAll('#results .score').length === 5")
    assert "k=12" in tab.evaluate("location.hash")
    tab.fill("#only", "nobody")
    until(tab, "document.getElementById('tally').textContent === 'No label contains this text.'")
    assert not tab.wrong


def test_a_part_of_an_image_is_searched_with(tab, data: Path):
    for start in ("gallery", "upload"):
        if start == "gallery":
            tab.locator("#items .tile").first.click()
        else:
            drop(tab, "mine.png", (data / "test" / "class-006" / "3.png").read_bytes())
            # until then the page shows the answer to the search before
            until(tab, "document.getElementById('query-kind').textContent === 'Your image'")
        labels(tab)
        until(tab, "document.getElementById('query-image').complete")
        scores = "[...document.querySelectorAll('#results .score')].map((score) => score.textContent).join()"
        before = tab.evaluate(scores)
        frame = tab.locator("#query-frame").bounding_box()
        tab.mouse.move(frame["x"] + 0.25 * frame["width"], frame["y"] + 0.25 * frame["height"])
        tab.mouse.down()
        tab.mouse.move(frame["x"] + 0.75 * frame["width"], frame["y"] + 0.6 * frame["height"], steps=4)
        tab.mouse.up()
        until(tab, "location.hash.includes('box=0.2')")
        until(tab, f"document.querySelectorAll('#results .score').length && {scores} !== '{before}'")
        assert tab.is_visible("#box")
        box = tab.locator("#box").bounding_box()
        assert abs(box["width"] - 0.5 * frame["width"]) < 6
        tab.keyboard.press("Escape")
        until(tab, f"{scores} === '{before}'")
        assert not tab.is_visible("#box")
        assert not tab.is_visible("#whole")
    assert not tab.wrong


def test_a_search_is_shared_by_its_link(browser, tab, address, data: Path):
    drop(tab, "mine.png", (data / "test" / "class-006" / "3.png").read_bytes())
    wanted = labels(tab)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#link")
    until(tab, "document.getElementById('link').textContent === 'Copied'")
    link = tab.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{address}#link=")
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(link)
        other.wait_for_selector("#results .score")
        assert other.locator("#results .label").all_inner_texts()[:5] == wanted[:5]
        assert other.inner_text("#query-kind") == "A shared search"
    tab.bring_to_front()  # only what is in front may write to the clipboard
    tab.locator("#results .tile").first.click()
    tab.wait_for_selector("#results .mark")
    tab.click("#link")
    # the button may still say that the link before was copied
    until(tab, "navigator.clipboard.readText().then((copied) => copied === location.href)")


def test_keys_move_between_pictures_and_back(tab):
    tab.locator("#items .tile").first.focus()
    tab.keyboard.press("Enter")
    labels(tab)
    tab.locator("#results .tile").first.focus()
    rank = "document.activeElement.querySelector('.rank').textContent"
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(rank) == "2"
    tab.keyboard.press("ArrowDown")
    below = int(tab.evaluate(rank))
    assert below > 3
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(rank) == "1"
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "only"
    tab.keyboard.press("Escape")
    tab.keyboard.press("Escape")
    until(tab, "document.getElementById('found').hidden")


@pytest.mark.parametrize("width", [360, 390, 760, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(tab, width, scheme):
    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    tab.locator("#items .tile").first.click()
    labels(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert dark == (scheme == "dark")
    tab.emulate_media(media="print")
    assert not tab.is_visible(".drop")
    assert tab.is_visible("#results .tile")
