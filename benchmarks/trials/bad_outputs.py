"""What evaluation, `embed` and `index` write, damaged or forged: test results, embeddings, indexes."""

import io
import json
import random
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.trials.bad_artifacts import Runs
from benchmarks.trials.bad_images import BAD, ODD
from benchmarks.trials.corruption import MaliciousPickle, damaged, edit_json, edit_line, put, replaced
from benchmarks.trials.fuzz_case import Case, command
from rankgrad.report.page import page
from rankgrad.report.run_reader import read_runs
from rankgrad.search import Gallery, Searcher

ODD_ROWS = ("", "a", "0,../../../etc/passwd,x,", "0,/etc/passwd,x,", "0,a\0b,x,", '"')


class Reports:
    """Everything that `rankgrad report` reads. It leaves out what it cannot read, says so, and shows no label as HTML."""

    name = "reports"

    def __init__(self, good: Runs) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        run = self.good.run(folder)
        test = run / "eval" / "test"
        path = rng.choice(
            (
                *(run / "recipe.json", run / "journal.jsonl", run / "checkpoints" / "best.json", test / "result.json"),
                *(test / "queries.npz", test / "queries.npz", test / "table.csv", test / "table.csv", test / "embeddings.npy"),
            )
        )
        what = self._changed(path, canary, rng)
        if path.name == "recipe.json":
            what += self._other_pictures(test, folder / "images", rng)
        return Case(f"{path.relative_to(run)}: {what}", partial(_report, run), (path.name, str(run)))

    def _changed(self, path: Path, canary: Path, rng: random.Random) -> str:
        draw = rng.random()
        if draw < 0.1:
            return replaced(path, rng)
        if draw < 0.4:
            what, content = damaged(path.read_bytes(), rng)
            put(path, content)
            return what
        if path.suffix == ".json":
            return edit_json(path, rng)
        if path.suffix == ".jsonl":
            return edit_line(path, rng)
        if path.suffix == ".csv":
            rows = path.read_text(encoding="utf-8").splitlines()
            row = rng.randrange(len(rows))
            script = "<script>alert(1)</script>"
            rows[row] = rng.choice(("", "a", "../../../etc/passwd,1,,1,1", f"{script},{script},,1,1", '"', "," * 90))
            put(path, "\n".join(rows).encode())
            return f"line {row + 1}: {rows[row][:20]!r}"
        return _changed_arrays(path, canary, rng)

    def _other_pictures(self, test: Path, images: Path, rng: random.Random) -> str:
        """The pictures themselves are of another kind."""
        result = json.loads((test / "result.json").read_text(encoding="utf-8"))
        listed = [line.split(",")[0] for line in (test / "table.csv").read_text(encoding="utf-8").splitlines()]
        what = rng.choice((*BAD, *ODD))
        content = {**BAD, **ODD}[what](rng)
        for name in listed[1:]:
            put(images / name, content)
        put(test / "result.json", json.dumps({**result, "root": str(images)}).encode())
        return f"; pictures are {what}"


def _changed_arrays(path: Path, canary: Path, rng: random.Random) -> str:
    """Arrays of other shapes and types, and objects where numbers should be."""
    arrays = dict(np.load(path)) if path.suffix == ".npz" else {"": np.load(path)}
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    what, new = rng.choice(
        (
            ("a row too few", array[:-1]),
            ("no rows", array[:0]),
            ("another axis", array[None]),
            ("a single number", np.array(3)),
            ("texts", array.astype(str)),
            ("complex", array.astype(np.complex64)),
            ("nan", np.full(array.shape, np.nan)),
            ("infinities", np.full(array.shape, -np.inf)),
            ("negative", np.full(array.shape, -5)),
            ("huge", np.full(array.shape, 2**62)),
            ("zeros", np.zeros_like(array)),
            ("booleans", array.astype(bool)),
            ("dates", np.zeros(array.shape, "M8[s]")),
            ("records", np.zeros(array.shape, [("a", "i4"), ("b", "f4")])),
        )
    )
    if rng.random() < 0.15:
        what, new = "a program in it", np.array([MaliciousPickle(canary)] * len(array), dtype=object)
    file = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(file, **{**arrays, name: new})
    else:
        np.save(file, new)
    put(path, file.getvalue())
    return f"{name} {what}"


def _report(run: Path) -> None:
    html = page(read_runs([run]))
    # the page has a script of its own, which its policy names; text of a run never becomes one
    assert "<script>alert" not in html


class Embeddings:
    """Folders that `rankgrad embed` and `rankgrad index` wrote."""

    name = "embeddings"

    def __init__(self, good: Runs) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        ids = rng.choice(("parquet", "csv"))
        place = self.good.embeddings(folder, ids)
        path = place / rng.choice(("embeddings.npy", f"ids.{ids}", f"ids.{ids}", "embedding.json", "index.json", "index.faiss"))
        draw = rng.random()
        if draw < 0.1:
            what = replaced(path, rng)
        elif path.suffix == ".json" and draw < 0.8:
            what = edit_json(path, rng)
        elif path.suffix == ".npy" and draw < 0.6:
            what = _changed_arrays(path, canary, rng)
        elif path.suffix == ".csv" and draw < 0.6:
            rows = path.read_text(encoding="utf-8").splitlines()
            row = rng.randrange(len(rows))
            rows[row] = rng.choice((*ODD_ROWS, "," * 90, "x" * 200_000))
            put(path, "\n".join(rows).encode())
            what = f"line {row + 1}: {rows[row][:30]!r}"
        else:
            what, content = damaged(path.read_bytes(), rng)
            put(path, content)
        call = rng.choice((partial(Gallery.open, place), partial(_search, place), partial(command, "index", str(place))))
        return Case(f"{path.name}: {what}", call, (path.name, str(place)))


def _search(place: Path) -> None:
    searcher = Searcher.open(place)
    searcher.search(np.array(searcher.gallery.embeddings[:2]), 3)
