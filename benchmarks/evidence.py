"""`python -m benchmarks.evidence`: docs/evidence.md and its curves, from its template and the runs of the studies.

The template is prose with fields in double braces, so that no figure in it is typed by hand. FILE is the name of a CSV file in
benchmarks/results that `rankgrad study` wrote:

    {{ table FILE GROUP METRIC,METRIC }}     a line per label: mean and deviation between seeds, interval over queries
    {{ mean FILE LABEL METRIC }}             in percent
    {{ gain FILE LABEL OTHER METRIC }}       the difference of two means over the seeds that both have
    {{ best FILE GROUP METRIC }}             the label with the largest mean
    {{ least FILE GROUP METRIC }}            the smallest mean of a group
    {{ most FILE GROUP METRIC }}             the largest one
    {{ values FILE LABEL METRIC }}           of every seed
    {{ tried FILE METRIC,METRIC }}           what was tried on validation classes, and what it gave
    {{ curves FILE GROUP METRIC TITLE }}     a picture of FILE-curves.csv
    {{ if FILE }} ... {{ end }}              only where the file exists; {{ if FILE GROUP }}: and has runs of the group
"""

import argparse
import csv
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankgrad._files import replace_file
from rankgrad._messages import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS, TEMPLATE, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "evidence.md", ROOT / "docs" / "evidence.md"
NOTICE = "<!-- made by `python -m benchmarks.evidence` from benchmarks/evidence.md: change that file -->\n"
FIELD = re.compile(r"\{\{ (.+?) \}\}")
# without another condition inside
CONDITION = re.compile(r"\{\{ if ([^}]+) \}\}\n((?:(?!\{\{ if ).)*?)\{\{ end \}\}\n", re.DOTALL)

Row = Mapping[str, str]


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    options = parser.parse_args(arguments)
    text = page(TEMPLATE.read_text(encoding="utf-8"), Evidence(RESULTS, PAGE.parent, draws=not options.check))
    if options.check:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE} is {'up to date' if is_current else 'not what python -m benchmarks.evidence writes'}")
        return 0 if is_current else 1
    replace_file(PAGE, text)
    print(PAGE)
    return 0


def page(template: str, evidence: "Evidence") -> str:
    """`template` with its fields filled in."""

    def fill(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[1])
        if name not in evidence.fields:
            raise ValueError(f"{match[0]}: there is no field {name!r}; there are {', '.join(evidence.fields)}")
        try:
            return evidence.fields[name](*arguments)
        except (KeyError, OSError, TypeError, statistics.StatisticsError) as error:
            raise ValueError(f"{match[0]}: {error!r}") from error

    while CONDITION.search(template):
        template = CONDITION.sub(lambda match: match[2] if evidence.has(*shlex.split(match[1])) else "", template)
    return NOTICE + FIELD.sub(fill, template)


class Evidence:
    """The fields of a template.

    Args:
        results: folder of the CSV files.
        pictures: folder that the page is in; pictures go to `images` in it.
        draws: whether pictures are drawn.
    """

    def __init__(self, results: Path, pictures: Path, *, draws: bool = True) -> None:
        self.results, self.pictures, self.draws = results, pictures, draws
        self._files: dict[str, list[Row]] = {}
        self.fields: Mapping[str, Callable[..., str]] = {
            "table": self.table,
            "mean": self.mean,
            "gain": self.gain,
            "best": self.best,
            "least": self.least,
            "most": self.most,
            "values": self.values,
            "tried": self.tried,
            "curves": self.curves,
        }

    def has(self, file: str, group: str = "") -> bool:
        """Whether there is such a file, with runs of the group."""
        exists = (self.results / f"{file}.csv").is_file()
        return exists and (not group or any(row["group"] == group for row in self.rows(file)))

    def rows(self, file: str) -> list[Row]:
        """The lines of a file that are results: of runs that chose settings only where there are no others."""
        if file not in self._files:
            with (self.results / f"{file}.csv").open(newline="", encoding="utf-8") as opened:
                rows: list[Row] = list(csv.DictReader(opened))
            self._files[file] = rows
        rows = self._files[file]
        return [row for row in rows if row["split"] == "test"] or rows

    def table(self, file: str, group: str, metrics: str) -> str:
        """Mean and deviation of each label, with the interval where there is one."""
        names = metrics.split(",")
        cells = [[label, *(_cell(rows, metric) for metric in names)] for label, rows in self._labels(file, group).items()]
        return markdown_table([group, *names], cells)

    def mean(self, file: str, label: str, metric: str) -> str:
        """In percent."""
        return f"{self._mean(file, label, metric):.1f}"

    def gain(self, file: str, label: str, other: str, metric: str) -> str:
        """Of `label` over `other` with the same seeds, with its sign."""
        ours, theirs = ({row["seed"]: row for row in self._of(file, name)} for name in (label, other))
        differences = [float(row[metric]) - float(theirs[seed][metric]) for seed, row in ours.items() if seed in theirs]
        return f"{round(100 * statistics.fmean(differences), 1) + 0.0:+.1f}"  # adding 0 makes 0.0 of -0.0

    def best(self, file: str, group: str, metric: str) -> str:
        """The label with the largest mean."""
        means = self._means(file, group, metric)
        return max(means, key=means.__getitem__)

    def least(self, file: str, group: str, metric: str) -> str:
        """The smallest mean of a group."""
        return f"{min(self._means(file, group, metric).values()):.1f}"

    def most(self, file: str, group: str, metric: str) -> str:
        """The largest mean of a group."""
        return f"{max(self._means(file, group, metric).values()):.1f}"

    def values(self, file: str, label: str, metric: str) -> str:
        """Those of all seeds."""
        rows = self._of(file, label)
        return ", ".join(f"{100 * float(row[metric]):.1f}" for row in rows)

    def tried(self, file: str, metrics: str) -> str:
        """A line per label: its runs on validation classes, each with what it changed."""
        self.rows(file)
        names = metrics.split(",")
        found: dict[str, dict[str, str]] = {}
        for row in self._files[file]:
            if row["split"] == "validation":
                found.setdefault(row["label"], {})[row["changes"]] = " / ".join(
                    f"{100 * float(row[name]):.1f}" for name in names
                )
        cells = [[label, "; ".join(f"{text}: {value}" for text, value in runs.items())] for label, runs in found.items()]
        return markdown_table(["loss", f"settings and validation {' / '.join(names)}"], cells)

    def curves(self, file: str, group: str, metric: str, title: str) -> str:
        """The link to a picture, which is drawn."""
        name = "-".join(re.findall(r"[a-z0-9]+", f"{file} {group} {metric}".lower()))
        if self.draws:
            rows = [row for row in self.rows(f"{file}-curves") if row["group"] == group]
            (self.pictures / "images").mkdir(parents=True, exist_ok=True)
            draw(rows, metric, title, self.pictures / "images" / f"{name}.svg")
        return f"![{title}](images/{name}.svg)"

    def _labels(self, file: str, group: str) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows(file):
            if row["group"] == group:
                found.setdefault(row["label"], []).append(row)
        if not found:
            raise KeyError(group)
        return found

    def _means(self, file: str, group: str, metric: str) -> dict[str, float]:
        return {label: 100 * statistics.fmean(_numbers(rows, metric)) for label, rows in self._labels(file, group).items()}

    def _of(self, file: str, label: str) -> list[Row]:
        rows = [row for row in self.rows(file) if row["label"] == label]
        if not rows:
            raise KeyError(label)
        # a line that stands in several groups is one
        return [row for row in rows if row["group"] == rows[0]["group"]]

    def _mean(self, file: str, label: str, metric: str) -> float:
        return 100 * statistics.fmean(_numbers(self._of(file, label), metric))


def _numbers(rows: Sequence[Row], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows]


def _cell(rows: Sequence[Row], metric: str) -> str:
    values = [100 * value for value in _numbers(rows, metric)]
    text = f"{statistics.fmean(values):.1f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.1f}"
    if not all(row.get(f"{metric} low") for row in rows):
        return text
    low, high = (100 * statistics.fmean(_numbers(rows, f"{metric} {end}")) for end in ("low", "high"))
    return f"{text} [{low:.1f}, {high:.1f}]"


def draw(rows: Sequence[Row], metric: str, title: str, path: Path) -> None:
    """A line per label, the mean over seeds, against the epoch."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    # the same picture gives the same file
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "rankgrad"}):
        figure, axes = plt.subplots(figsize=(9, 4.8))
        for number, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
            points: dict[int, list[float]] = {}
            for row in rows:
                if row["label"] == label:
                    points.setdefault(int(row["epoch"]), []).append(100 * float(row[metric]))
            means = [statistics.fmean(points[epoch]) for epoch in sorted(points)]
            axes.plot(sorted(points), means, ("-", "--", ":")[number // 10 % 3], marker="o", markersize=4, label=label)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"{metric} in %")
        axes.set_title(title, loc="left")
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
