"""`rankgrad report RUN [RUN...]`: one HTML file about one run or several, which opens offline."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rankgrad.report.page import page
from rankgrad.report.run_reader import Run, read_runs
from rankgrad.report.thumbnails import Thumbnails


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs, write the page, say where it is."""
    parser = argparse.ArgumentParser(prog="rankgrad report", description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run; others are compared with the first")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("report.html"), help="file to write (default: %(default)s)"
    )
    parser.add_argument("--split", metavar="NAME", help="test that curves and pictures are of (default: test, or the first)")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="leave pictures of queries out")
    given = parser.parse_args(arguments)
    runs = read_runs(given.runs)
    check_split(runs, given.split)
    write(given.out, page(runs, split=given.split, pictures=Thumbnails(wanted=given.pictures)))
    print(f"{given.out} ({given.out.stat().st_size / 1e6:.1f} MB)")
    return 0


def check_split(runs: Sequence[Run], split: str | None) -> None:
    """Refuses a split that no run was tested on."""
    known = sorted({name for run in runs for name in run.evaluations})
    if split is not None and split not in known:
        there = f"there is {', '.join(known)}" if known else "nothing has been tested yet, `rankgrad eval RUN` does it"
        raise ValueError(f"--split must be something that was tested, got {split!r}: {there}")


def write(path: Path, content: str) -> None:
    """Replaces the file in one move, so that nobody reads half a page."""
    if path.is_dir():
        raise IsADirectoryError(f"--out must be a file, got the folder {path}: give {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".html")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        temporary.chmod(0o644)  # mkstemp makes it readable for its owner only
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
