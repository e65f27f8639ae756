"""`rankgrad figures`: draw the papers' pictures, each with its caption, and write down the numbers that were drawn."""

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rankgrad.report.figures import batch_bias, bins, landscape, margin, surrogate
from rankgrad.report.figures.style import DARK, LIGHT, Theme, save

NUMBERS = "figures.json"


@dataclasses.dataclass(frozen=True)
class Picture:
    """Numbers, the picture of them and the text under it."""

    shows: str
    compute: Callable[[], Any]
    draw: Callable[[Any, Theme], Figure]
    caption: Callable[[Any], str]


PICTURES: Mapping[str, Picture] = {
    "rambo-landscape": Picture(
        "a loss of ranks and its blackbox interpolations (RaMBO, figure 1)",
        landscape.compute,
        landscape.draw,
        landscape.caption,
    ),
    "batch-bias": Picture(
        "the mAP of a mini-batch against its size (RaMBO, figure 2)", batch_bias.compute, batch_bias.draw, batch_bias.caption
    ),
    "margin-collapse": Picture(
        "scores that collapse without a margin (RaMBO, figure 3)", margin.compute, margin.draw, margin.caption
    ),
    "recall-surrogate": Picture(
        "smooth beside exact recall@k, and its gradient by rank (RS@k, figures 1 and 3)",
        surrogate.compute,
        surrogate.draw,
        surrogate.caption,
    ),
    "fastap-bins": Picture("the trade-off over the number of bins (FastAP, figure 4)", bins.compute, bins.draw, bins.caption),
}


def main(arguments: list[str] | None = None) -> int:
    """Writes NAME.svg (or .png) and NAME.txt for each picture, and one file of numbers."""
    options = _parsed(arguments)
    theme, ending = (DARK, "-dark") if options.dark else (LIGHT, "")
    for name in options.names or PICTURES:
        picture = PICTURES[name]
        numbers = picture.compute()
        path = options.out / f"{name}{ending}.{options.format}"
        save(picture.draw(numbers, theme), path, theme)
        text = picture.caption(numbers)
        (options.out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        _note(options.out / NUMBERS, name, {"shows": picture.shows, "caption": text, "numbers": as_json(numbers)})
        print(path, flush=True)
    return 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rankgrad figures",
        description=__doc__,
        epilog="\n".join(["pictures:", *(f"  {name:18} {picture.shows}" for name, picture in PICTURES.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help="pictures to draw, all without one")
    add("--out", type=Path, default=Path("figures"), metavar="DIR", help="folder to write to (default: %(default)s)")
    add("--format", choices=("svg", "png"), default="svg", help="of the pictures: %(choices)s (default: %(default)s)")
    add("--dark", action="store_true", help="on a dark background, as NAME-dark")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in PICTURES:
            near = difflib.get_close_matches(name, PICTURES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(PICTURES)}"
            parser.error(f"unknown picture {name!r}: {hint}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"--out must be a folder that can be written to, got {options.out}: {problem.strerror}")
    return options


def as_json(numbers: Any) -> dict[str, Any]:
    """The fields of a dataclass with arrays as lists, to five digits: more than any eye resolves."""

    def plain(value: Any) -> Any:
        if isinstance(value, (np.ndarray, list, tuple)):
            return [plain(each) for each in value]
        if isinstance(value, (float, np.floating)):
            return float(f"{value:.5g}")
        return value.item() if isinstance(value, np.integer) else value

    return {field.name: plain(getattr(numbers, field.name)) for field in dataclasses.fields(numbers)}


def _note(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Put the numbers of a picture beside those of the others that are in the folder."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # no file, or not ours any more: begun anew
        known = {}
    path.write_text(json.dumps({**known, name: entry}, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
