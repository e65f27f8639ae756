"""What the trials found, one by one."""

import json
import os
import re

import numpy as np
import pytest
import torch

from rankgrad import cli
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError
from rankgrad.data.readers.roxford import _box
from rankgrad.data.table import Table
from rankgrad.models import ModelSpec, build_model
from rankgrad.report.run_reader import read_runs
from rankgrad.runs.recipe import settings_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n"


def decoded(path):
    return ImageDecoder(Table("some/test", path.parent, (path.name,), np.zeros(1, np.int64)), 24, False).planes(0)


def test_a_pipe_with_the_name_of_an_image_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImageError, match=r"a\.jpg is not a file"):
        decoded(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImageError, match=r"b\.jpg does not exist"):
        decoded(tmp_path / "b.jpg")


def test_a_postscript_program_is_no_image_whatever_its_name(tmp_path):
    from PIL import Image

    (tmp_path / "a.jpg").write_bytes(POSTSCRIPT)
    with Image.open(tmp_path / "a.jpg") as image:
        assert image.format == "EPS", "Pillow would hand it to Ghostscript"
    with pytest.raises(UnreadableImageError, match=r"a\.jpg is not an image that Pillow can read as one of JPEG, PNG"):
        decoded(tmp_path / "a.jpg")


@pytest.mark.parametrize("box", [[0, 0, 10**400, 10**400], [0, 0, 1e9, 5], [-(10**400), 0, 5, 5]])
def test_a_box_larger_than_any_image(box):
    with pytest.raises(ValueError, match=r"gnd\[0\]: bbx must be x1, y1, x2, y2"):
        _box(box, "gnd[0]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: dict(enumerate(state.values())), "holds no tensors by name"),
        (lambda state: {**state, 3: torch.zeros(1), "trunk.0.weight": None}, "1 missing"),
        (lambda state: {**state, "trunk.0.weight": state["trunk.0.weight"] * torch.nan}, "1 not finite real numbers"),
        (lambda state: {**state, "trunk.0.weight": state["trunk.0.weight"].to("meta")}, "1 not finite real numbers"),
        (lambda state: {**state, "trunk.0.weight": state["trunk.0.weight"] + 0j}, "1 not finite real numbers"),
        (lambda state: {**state, "head.linear.bias": torch.full((8,), torch.inf)}, "head that are not finite"),
    ],
)
def test_weights_that_no_network_can_use(change, message, tmp_path):
    state = build_model(ModelSpec(trunk="convnet", dim=8)).state_dict()
    first = next(name for name in state if name.startswith("trunk.") and name.endswith("0.weight"))
    torch.save(change({name.replace(first, "trunk.0.weight"): value for name, value in state.items()}), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=rf"w\.pt.*{message}"):
        build_model(ModelSpec(trunk="convnet", dim=8, weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize("value", [10**400, 2**63, -(2**63)])
def test_a_number_that_nothing_can_hold(value):
    for name in ("size", "lr", "seed", "chunk_size"):
        with pytest.raises(ValueError, match=rf"`{name}` must be at most 9,223,372,036,854,775,807, got -?\d"):
            RetrievalRecipe(name="x", **{name: value})


@pytest.mark.parametrize("text", ["9" * 5000, "1__0", "1_", "\u0663"])
def test_text_that_is_no_number_is_told_by_its_flag(text):
    with pytest.raises(ValueError, match=r"^`batch_size` must be an integer, got '") as caught:
        settings_of(RetrievalRecipe)["batch_size"].parse(text)
    assert len(str(caught.value)) < 200


def test_thousands_may_still_be_marked():
    assert settings_of(RetrievalRecipe)["batch_size"].parse("4_000") == 4000
    assert settings_of(RetrievalRecipe)["batch_size"].parse("+16") == 16


def test_a_flag_whose_value_is_the_end_of_flags(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--epochs=--"])
    assert "--epochs needs a value, got '--'" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"name": "x", "settings": {}, "data": 5}', "[" * 100_000, '{"a":' * 100_000])
def test_a_recipe_file_that_is_none(content, tmp_path):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"recipe\.json is not a recipe that this version can read"):
        RunFolder(tmp_path).read_recipe(RetrievalRecipe)


def test_a_run_killed_before_its_first_step_may_begin_again(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".writing-probe").touch()
    (tmp_path / ".writing-recipe.json").touch()
    RunFolder(tmp_path).check_free()
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    with pytest.raises(ValueError, match="already exists and is not empty"):
        RunFolder(tmp_path).check_free()


@pytest.fixture
def tested(tmp_path):
    place = tmp_path / "run" / "eval" / "test"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps({"metrics": {"R@1": 0.5}, "protocol": "all-vs-all"}))
    (place / "table.csv").write_text("path,label\na.jpg,1\nb.jpg,1\n")
    np.savez(place / "queries.npz", index=np.arange(2), first_rank=np.ones(2))
    np.save(place / "embeddings.npy", np.eye(2, dtype=np.float32))
    return place


def problems_of(place):
    return [problem for problem in read_runs([place.parents[1]])[0].problems if problem.startswith("eval/")]


def test_a_report_reads_a_whole_test(tested):
    assert problems_of(tested) == []


@pytest.mark.parametrize("name", ["result.json", "table.csv", "queries.npz", "embeddings.npy"])
def test_a_report_waits_for_no_pipe(name, tested):
    (tested / name).unlink()
    os.mkfifo(tested / name)
    assert problems_of(tested) == [f"eval/test/{name} is not a file"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"first_rank": np.array(["a", "b"])}, "has columns of a wrong type: first_rank"),
        ({"index": np.array([0.0, 1.0])}, "has columns of a wrong type: index"),
        ({"index": np.array([-1, 0])}, "has columns of a wrong type: index"),
        ({"neighbours": np.full((2, 3), -1)}, "has columns of a wrong type: neighbours"),
        ({"neighbours": np.zeros((2, 3), int), "scores": np.zeros((2, 2))}, "has columns of a wrong type: scores"),
        ({"first_rank": np.array(3)}, "does not have one row per query"),
        ({"first_rank": np.zeros(2, "M8[s]")}, "has columns of a wrong type: first_rank"),
    ],
)
def test_a_report_leaves_odd_columns_out(column, message, tested):
    np.savez(tested / "queries.npz", **{"index": np.arange(2), "first_rank": np.ones(2), **column})
    found = problems_of(tested)
    assert len(found) == 1
    assert re.search(message, found[0])


def test_a_report_survives_deep_objects_and_huge_numbers(tested):
    (tested / "result.json").write_text('{"metrics": {"R@1": 1' + "0" * 400 + "}}")
    run = read_runs([tested.parents[1]])[0]
    assert np.isnan(run.evaluations["test"].metrics["R@1"])
    (tested / "result.json").write_text("[" * 100_000)
    assert "result.json cannot be read" in problems_of(tested)[0]
