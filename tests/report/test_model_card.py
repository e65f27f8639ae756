"""The model card: what the Hub reads in its front matter, and what it tells people."""

import json

import pytest
from huggingface_hub import ModelCard
from report.run_folders import make_data, write_run, write_test

from rankgrad._citations import citations_of
from rankgrad.cli.card_command import training_command
from rankgrad.models.trunks import describe_first_weights
from rankgrad.recipes.catalogue import find
from rankgrad.report.model_card import CardFacts, model_card
from rankgrad.report.run_reader import read_runs

FACTS = CardFacts(
    name="pets",
    checkpoint="best",
    step=40,
    dim=8,
    parameters=1_234_567,
    preparation=["crop"],
    first_weights="Training began with random weights.",
    command="rankgrad train --data DIR",
    files={"model.onnx": "the network", "recipe.json": "settings"},
    licence="apache-2.0",
)


@pytest.fixture
def run(tmp_path):
    data = make_data(tmp_path / "data", names=("red [cat]", "*dog*"))
    folder = write_run(tmp_path / "run", data)
    write_test(folder / "eval/test@untrained", data, data.embeddings(noise=3.0, seed=5))
    path = folder / "eval/test@untrained/result.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"split": "test", "checkpoint": {"name": "untrained", "step": 0}})
    )
    classes = {split: {name: [4, "a", "b"] for name in names} for split, names in {"train": "abc", "test": "cde"}.items()}
    content = {split: {"fingerprint": f"f-{split}", "items": 12, "classes": found} for split, found in classes.items()}
    (folder / "data.json").write_text(json.dumps(content))
    recipe = json.loads((folder / "recipe.json").read_text())
    names = {"train": {str(i): f"class <{i}>" for i in range(30)}}
    (folder / "recipe.json").write_text(json.dumps({**recipe, "data": "/photos/pets", "class_names": names}))
    return folder


def test_the_hub_reads_the_front_matter(run):
    (read,) = read_runs([run])
    card = ModelCard(model_card(read, FACTS))
    assert (card.data.library_name, card.data.license, card.data.pipeline_tag) == (
        "rankgrad",
        "apache-2.0",
        "image-feature-extraction",
    )
    assert {"image-retrieval", "onnx"} <= set(card.data.tags)
    found = {result.metric_name: result for result in card.data.eval_results}
    first = found["R@1 (all-vs-all)"]
    assert first.metric_value == pytest.approx(read.evaluations["test"].metrics["R@1"], abs=1e-4)
    assert first.metric_args["interval_95"] == pytest.approx(read.evaluations["test"].intervals["R@1"], abs=1e-4)
    assert (first.dataset_name, first.metric_type, first.dataset_split) == ("pets (test)", "recall_at_1", "test")


def test_people_read_results_beside_the_untrained_network_and_limits(run):
    (read,) = read_runs([run])
    text = model_card(read, FACTS)
    header = next(line for line in text.splitlines() if line.startswith("| metric"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        *("metric", "this model", "95% interval", "untrained", "published by others"),
    ]
    row = next(line for line in text.splitlines() if line.startswith("| R@1"))
    trained, untrained = (read.evaluations[key].metrics["R@1"] for key in ("test", "test@untrained"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (cells[1], cells[3]) == (f"{100 * trained:.1f}", f"{100 * untrained:.1f}")
    assert cells[4] == "62.7 (FastAP, Table 1)"
    assert "1 class of the test was trained on" in text
    assert "| train |     12 |       3 | `f-train`   |" in text
    assert r"class \<0\>" in text
    assert "and 10 more, see recipe.json" in text
    assert "cakir2019deep" in text
    assert "/photos" not in text
    for title in (
        "Use",
        "Results",
        "Data",
        "Preprocessing",
        "Training",
        "Limits",
        "Licence of the weights",
        "Citation",
        "Files",
    ):
        assert f"\n## {title}\n" in text


def test_what_makes_numbers_doubtful_is_said(run):
    (run / "checkpoints/best.json").write_text(json.dumps({"selected_on": "test", "step": 40, "epoch": 4}))
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "debug": True}))
    (read,) = read_runs([run])
    text = model_card(read, FACTS)
    assert "selected on test itself, so the numbers on it are too high" in text
    assert "its numbers mean nothing" in text
    assert not ModelCard(text).data.eval_results
    (bare,) = read_runs([run])
    untested = model_card(type(bare)(run, "run", bare.recipe), FACTS)
    assert "The model has not been tested." in untested


def test_the_command_names_what_differs_from_the_recipe():
    recipe = find("own-images").with_settings({"lr": 3e-4, "weights": "/home/me/net.safetensors", "flip": False})
    assert training_command(recipe) == "rankgrad train own-images --data DIR --no-flip --weights net.safetensors --lr 0.0003"


def test_licences_and_citations():
    assert "apache-2.0" in describe_first_weights("vit-b16", "default")
    assert describe_first_weights("resnet50", "default") == "Training began with torchvision's ImageNet weights of resnet50."
    assert describe_first_weights("resnet50", "/home/me/a.pth") == "Training began with the weights in a.pth."
    assert "rolinek2020" in citations_of("rambo-ap")
    assert "patel2022" not in citations_of("rambo-ap")
    assert "patel2022" in citations_of("smooth-ap", simix=True)
    assert citations_of().count("@inproceedings") == 3
