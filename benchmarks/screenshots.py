"""`python -m benchmarks.screenshots`: train on the built-in glyphs and photograph the report and the search page in Chromium.

Writes report.png and search.png for docs/explore.md. Needs playwright and an installed Chromium.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rankgrad.cli import main as rankgrad

TRAINING = "--classes 150 --epochs 25 --batch-size 400 --warmup 8 --no-tensorboard --device cpu --cache none"
SERVE = "import sys; from rankgrad.cli.search_commands import main_serve; sys.exit(main_serve(sys.argv[1:]))"
WIDTH, HEIGHT = 1280, 860


def main() -> None:
    """Train, write the pages, photograph them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures [docs/images]")
    parser.add_argument("--train", default=TRAINING, help="flags of `rankgrad train glyphs-recall-at-k` [%(default)s]")
    given = parser.parse_args()
    chromium = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        parser.error("no Chromium is installed")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run, gallery = Path(scratch, "glyphs"), Path(scratch, "gallery")
        for arguments in (
            ["train", "glyphs-recall-at-k", "--out", str(run), *given.train.split()],
            ["report", str(run)],
            ["embed", str(run), "--data", "glyphs", "--out", str(gallery), "--device", "cpu"],
        ):
            if rankgrad(arguments):
                sys.exit(1)
        photograph(chromium, run, gallery, given.out)


def photograph(chromium: str, run: Path, gallery: Path, out: Path) -> None:
    """The queries and the map of the report, and the answer of the search page."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-c", SERVE, str(run), "--index", str(gallery), "--port", "0", "--device", "cpu"]
    with sync_playwright() as playwright, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            tab: Any = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            tab.goto((run / "report.html").resolve().as_uri())
            tab.locator("#queries").scroll_into_view_if_needed()
            tab.evaluate("document.querySelector('#queries').scrollIntoView()")
            tab.screenshot(path=out / "report.png")
            tab.goto(address)
            tab.locator("#items .tile").first.click()
            tab.locator("#results .tile").first.wait_for()
            tab.wait_for_load_state("networkidle")
            tab.screenshot(path=out / "search.png")
        finally:
            browser.close()
            server.terminate()


if __name__ == "__main__":
    main()
