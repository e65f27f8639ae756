"""Every recipe from data to result files, shrunk, on a fake copy of its data set."""

import csv
import json
import math

import numpy as np
import pytest

from rankgrad import cli
from rankgrad.recipes.catalogue import recipes_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe

# what each data set is tested on, and how
PROTOCOLS = {
    "sop": {"test": "all-vs-all"},
    "inshop": {"test": "query-gallery"},
    "vehicleid": {"small": "all-vs-all", "medium": "all-vs-all", "large": "all-vs-all"},
    "inat": {"test": "all-vs-all"},
    "cub": {"test": "all-vs-all"},
    "cars": {"test": "all-vs-all"},
    "gldv1": {
        "roxford5k": "roxford",
        "roxford5k+r1m": "roxford+distractors",
        "rparis6k": "roxford",
        "rparis6k+r1m": "roxford+distractors",
    },
    "omniglot": {"test": "all-vs-all"},
    "glyphs": {"test": "all-vs-all"},
    "folder": {"test": "all-vs-all"},
}
# those of texts need an encoder: tests/runs/test_texts.py
IMAGES = {name: recipe for name, recipe in recipes_of(RetrievalRecipe).items() if not recipe.is_text}


@pytest.mark.parametrize("recipe", IMAGES.values(), ids=IMAGES)
def test_recipe_in_debug(recipe, tree, tmp_path, capsys):
    folder = tmp_path / "run"
    data = [] if recipe.data_set == "glyphs" else ["--data", str(tree("landmarks" if recipe.test_on else recipe.data_set))]
    command = ["train", recipe.name, *data, "--debug", "--out", str(folder), "--device", "cpu", "--cache", "none"]
    assert cli.main([*command, "--no-tensorboard", "--traceback"]) == 0
    assert "its numbers mean nothing" in capsys.readouterr().out
    assert "mean nothing" in (folder / "DEBUG.txt").read_text()

    saved = json.loads((folder / "recipe.json").read_text())
    assert saved["debug"] is True
    assert saved["settings"]["loss"] == recipe.loss
    assert len(saved["published"]) == len(recipe.published)

    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert entries[0]["kind"] == "start"
    assert entries[-1]["kind"] == "end"
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert len(steps) >= 2
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert json.loads((folder / "checkpoints" / "last.json").read_text())["step"] == len(steps)
    selected = recipe.validation == "test"
    assert (folder / "checkpoints" / "best.json").exists() == selected

    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("eval/*/result.json")}
    assert {split: result["protocol"] for split, result in results.items()} == PROTOCOLS[recipe.data_set]
    for split, result in results.items():
        place = folder / "eval" / split
        wanted = {number.metric for number in recipe.published if number.split == split}
        assert wanted <= result["metrics"].keys()
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        with (place / "table.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        embeddings, queries = np.load(place / "embeddings.npy"), np.load(place / "queries.npz")
        assert embeddings.shape == (len(rows), 16)
        np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
        assert all(rows[row]["is_query"] == "1" for row in queries["index"])
        assert queries["neighbours"].shape[0] == len(queries["index"])
        assert set(queries["neighbours"].ravel()) <= {i for i, row in enumerate(rows) if row["is_gallery"] == "1"} | set(
            range(len(rows), len(rows) + 2 * split.endswith("+r1m"))
        )
