"""Several processes under torchrun agree with one: gradients, evaluation, training, resumption, and how they end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import worker_cases as cases

from rankgrad.train.processes import ALONE

SCRIPT = Path(cases.__file__)
COUNTS = (2, 4)
TOLERANCE = 1e-9


def torchrun(processes, *command):
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # a process that aborts says where it was
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*launcher, *map(str, command)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What 1, 2 and 4 processes find; each goes on with the runs that the one before has begun."""
    folders = {count: tmp_path_factory.mktemp(f"by-{count}") for count in (*COUNTS, 1)}
    torchrun(2, SCRIPT, folders[2])
    torchrun(4, SCRIPT, folders[4], folders[2])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = cases.everything(ALONE, folders[1], folders[4])
    finally:
        torch.set_num_threads(threads)
    return {1: alone, **{count: torch.load(folders[count] / "found.pt", weights_only=False) for count in COUNTS}}


def difference(value, reference):
    scale = float(reference.norm())
    return float((value - reference).norm()) / (scale or 1)


def test_the_table_has_every_preset_way_and_batch(found):
    names = found[1]["table"]
    assert len(names) >= 70
    parts = [set(column) for column in zip(*(name.split(" / ") for name in names), strict=True)]
    assert parts == [set(cases.PRESETS), set(cases.AROUND), set(cases.BATCHES), set(cases.WAYS)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("table", ["table", "sparse"])
def test_loss_and_every_gradient_are_those_of_one_process(found, table, count):
    for name, expected in found[1][table].items():
        came = found[count][table][name]
        assert came.keys() == expected.keys()
        worst = max(difference(came[key], expected[key]) for key in expected)
        assert worst <= TOLERANCE, f"{name}: {worst}"


@pytest.mark.parametrize("count", COUNTS)
def test_weights_of_queries_are_those_of_one_process(found, count):
    for name, expected in found[1]["weighted"].items():
        for key, value in expected.items():
            assert difference(found[count]["weighted"][name][key], value) <= TOLERANCE, f"{name}: {key}"


def test_the_table_can_tell_losses_and_batches_apart(found):
    # so that agreement is no accident: no two cases that should differ have the same gradient
    table = found[1]["table"]
    for batch in cases.BATCHES:
        for around in cases.AROUND:
            values = [
                float(next(v for k, v in table.items() if k.startswith(f"{p} / {around} / {batch}"))["loss"])
                for p in cases.PRESETS
            ]
            # an empty query that enters the mean matters only where there is one
            assert len({round(value, 9) for value in values}) >= len(values) - 1
    assert all(float(entry["0.weight"].norm()) > 1e-4 for name, entry in table.items() if "rambo" not in name)


@pytest.mark.parametrize("count", COUNTS)
def test_the_loss_is_the_same_number_on_every_process(found, count):
    losses = found[count]["losses of all"]
    assert len(losses) == count
    assert all(other == losses[0] for other in losses)


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_are_exchanged_once_a_step_whatever_the_chunks(found, count):
    share = 16 // count
    assert found[count]["exchanges"] == {"1": 1, str(share // 2): 1, str(share): 1}


@pytest.mark.parametrize("count", COUNTS)
def test_what_one_process_does_wrong_all_of_them_refuse(found, count):
    for name, wrong in (("nothing", "0 x 5"), ("another width", "3 x 6")):
        said = found[count]["refusals"][name]
        assert len(said) == count
        assert set(said) == {said[0]}
        assert re.search(rf"every process must bring at least one embedding.*3 x 5.*{wrong} by rank", said[0])
    said = found[count]["refusals"]["weights of one"]
    assert set(said) == {said[0]}
    assert "every process must give weights or none, got none by rank 0" in said[0]


@pytest.mark.parametrize("count", COUNTS)
def test_a_divided_gallery_is_ranked_like_a_whole_one(found, count):
    assert len(found[1]["evaluations"]) == 4
    for name, expected in found[1]["evaluations"].items():
        came = found[count]["evaluations"][name]
        assert came["metrics"] == pytest.approx(expected["metrics"], abs=1e-12)
        assert (came["protocol"], came["skipped"]) == (expected["protocol"], expected["skipped"])
        assert expected["skipped"] > 0
        for key in ("index", "categories"):
            np.testing.assert_array_equal(came[key], expected[key])
        np.testing.assert_array_equal(came["neighbours"][0], expected["neighbours"][0])
        np.testing.assert_allclose(came["neighbours"][1], expected["neighbours"][1], atol=1e-6)
        assert came["per_query"].keys() == expected["per_query"].keys()
        for column, values in expected["per_query"].items():
            np.testing.assert_allclose(came["per_query"][column], values, rtol=1e-12, err_msg=f"{name}, {column}")
        np.testing.assert_array_equal(came["per_query"]["first_rank"], expected["per_query"]["first_rank"])


WHOLE = ["whole", "divided", "chosen chunks", "divided, chosen chunks", "short of memory"]
RESUMED = ["stopped, resumed as ddp", "divided-stopped, resumed as ddp", "stopped, resumed as fsdp"]


@pytest.mark.parametrize(
    ("count", "name"),
    [*((count, name) for count in COUNTS for name in WHOLE), *((count, name) for count in (4, 1) for name in RESUMED)],
)
def test_training_takes_the_steps_of_one_process(found, count, name):
    """Also divided by FSDP, in smaller chunks, and continued by 4 processes where 2 stopped and by 1 where 4 did."""
    expected, came = found[1]["runs"]["whole"], found[count]["runs"][name]
    assert came["reasons"] == ["finished"] * count
    assert [entry["step"] for entry in came["steps"]] == list(range(1, 9))
    for entry, other in zip(came["steps"], expected["steps"], strict=True):
        assert entry == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)
    assert [m["margin"] for m in came["metrics"]] == pytest.approx([m["margin"] for m in expected["metrics"]], abs=TOLERANCE)
    assert came["files"] == expected["files"] == ["manifest.json", "state.safetensors", "weights.safetensors"]
    assert came["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        assert difference(came["weights"][key], weight) <= TOLERANCE
        assert torch.equal(came["model"][key], came["weights"][key])


def test_training_does_change_the_weights(found):
    whole, stopped = (found[1]["runs"][name]["weights"] for name in ("whole", "stopped"))
    assert max(difference(whole[key], stopped[key]) for key in whole) > 1e-3


@pytest.mark.parametrize("count", COUNTS)
def test_one_process_out_of_memory_makes_all_take_smaller_chunks(found, count):
    said = found[count]["runs"]["short of memory"]["warnings"]
    assert said == [
        f"out of memory at step 1, which is repeated: {what}" for what in ("no chunk is kept any more", "chunk_size 4 -> 2")
    ]


@pytest.mark.parametrize("count", [*COUNTS, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(found, count):
    for name in ("stopped", "divided, stopped"):
        came = found[count]["runs"][name]
        assert came["reasons"] == ["interrupted"] * count
        assert [entry["step"] for entry in came["steps"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("count", COUNTS)
def test_a_loss_that_is_no_number_ends_all_with_the_images_of_all(found, count):
    said = found[count]["runs"]["spoilt"]["said"]
    assert len(said) == count
    alone = found[1]["runs"]["spoilt"]["said"][0]
    images = re.search(r"images (.*?)\. The", alone).group(1).split(", ")
    for sentence in said:
        assert re.match(r"step 4: the loss is nan; the batch was images .* \(rank 0\), .*the last checkpoint is", sentence)
        assert re.findall(r"\b\d+\b(?=,| \(rank)", re.search(r"images (.*?)\. The", sentence).group(1)) == images


def test_check_equivalence_tells_right_from_wrong(found):
    reports = found[2]["equivalences"]
    for name in ("ddp", "fsdp", "with memory", "with simix"):
        assert reports[name].agrees, str(reports[name])
        assert reports[name].gradient[0] <= TOLERANCE
        assert sum(reports[name].counts) == 9, "the whole batch of a shrunk recipe"
        assert "they agree" in str(reports[name])
    wrong = reports["gradients summed where they are averaged"]
    assert not wrong.agrees
    assert wrong.gradient[0] == pytest.approx(1 / 2), "half of the gradient is missing"
    assert "they DO NOT agree" in str(wrong)
