"""A run from the command line: where it writes, how it goes on, what is tested and compared."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rankgrad as rg
from rankgrad import cli
from rankgrad.data.table import Table
from rankgrad.eval import evaluate
from rankgrad.recipes.catalogue import find
from rankgrad.runs.pipeline import start_run
from rankgrad.runs.recipe import Published
from rankgrad.runs.results_table import comparison
from rankgrad.runs.retrieval_batches import SubsetSampler, largest_batch, make_sampler
from rankgrad.runs.retrieval_evaluation import RetrievalEvaluation
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask, whiten
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.train.processes import ALONE

CPU = torch.device("cpu")
QUIET = ["--device", "cpu", "--cache", "none", "--no-tensorboard"]


def train(*arguments: object) -> int:
    return cli.main(["train", *map(str, arguments), *QUIET])


def last_weights(run: Path) -> bytes:
    folder = json.loads((run / "checkpoints" / "last.json").read_text())["folder"]
    return (run / "checkpoints" / folder / "weights.safetensors").read_bytes()


def saved_recipe(run: Path) -> RetrievalRecipe:
    return RunFolder(run).read_recipe(RetrievalRecipe)


def task_for(recipe, data=None) -> RetrievalTask:
    return RetrievalTask(recipe, RunContext(data, CPU))


def table(labels, **known) -> Table:
    labels = np.asarray(labels, dtype=np.int64)
    return Table("some/train", Path("/images"), tuple(f"{i}.jpg" for i in range(len(labels))), labels, **known)


def test_a_resumed_run_ends_like_one_that_was_never_stopped(tree, tmp_path):
    # constant learning rate, so that a longer run begins like a shorter one; memory, so that there is a state to lose
    command = ("cub-rambo-loglog", "--data", tree("cub"), "--debug", "--schedule", "constant")
    assert train(*command, "--out", tmp_path / "whole") == 0
    assert train(*command, "--out", tmp_path / "parts", "--epochs", 1) == 0
    assert last_weights(tmp_path / "parts") != last_weights(tmp_path / "whole")
    assert train("--resume", tmp_path / "parts", "--epochs", 2) == 0
    assert last_weights(tmp_path / "parts") == last_weights(tmp_path / "whole")
    # another seed is another run, so equality above says something
    assert train(*command, "--out", tmp_path / "other", "--seed", 1) == 0
    assert last_weights(tmp_path / "other") != last_weights(tmp_path / "whole")


def test_training_images_may_be_stored_larger_than_those_that_are_tested():
    recipe = replace(find("glyphs-recall-at-k"), classes=12, batch_size=48, size=24, stored_side=28)
    recipe = replace(recipe, crop="center", flip=False)
    small, large = (task_for(replace(recipe, train_side=side)) for side in (0, 56))
    assert {int(side) for side in large.data.split(large.recipe, "train").images.shapes.flatten()} == {56}
    assert {int(side) for side in large.data.split(large.recipe, "test").images.shapes.flatten()} == {28}
    seen = []
    for task in (small, large):
        _, indices, images, _ = next(task.make_batches().iterate(0))
        assert images.shape[2:] == (24, 24)
        seen.append((indices, images.float()))
    assert torch.equal(seen[0][0], seen[1][0])
    # the same part of every image: resizing once or twice changes pixels, another crop would change all of them
    assert not torch.equal(seen[0][1], seen[1][1])
    correlation = torch.corrcoef(torch.stack([images.flatten() for _, images in seen]))[0, 1]
    assert correlation > 0.95


def test_a_folder_in_use_is_refused_and_a_changed_run_is_not_resumed(tree, tmp_path, capsys):
    out = tmp_path / "run"
    command = ("sop-fastap-r50-m96", "--data", tree("sop"), "--debug", "--out", out)
    assert train(*command) == 0
    assert train(*command) == 2
    assert f"{out} already exists and is not empty: resume the run in it with --resume {out}" in capsys.readouterr().err
    assert train("--resume", out, "--bins", 5) == 2
    assert re.search(r"was started differently \(bins was 10 and is 5\)", capsys.readouterr().err)
    assert saved_recipe(out).bins == 10, "a refused change leaves the run as it was"
    with pytest.raises(SystemExit, match="2"):
        train("--resume", out, "--out", tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    assert train(*command[:-1], tmp_path / "full") == 2
    assert "choose another folder with --out" in capsys.readouterr().err


def test_a_run_that_failed_before_its_first_step_may_begin_again(tree, tmp_path):
    command = ("sop-fastap-r50-m96", "--data", tree("sop"), "--debug", "--out", tmp_path / "run")
    assert train(*command, "--warmup-steps", 1000) == 2
    assert train(*command) == 0


def test_weights_are_not_needed_to_go_on_or_to_test(tree, tmp_path):
    assert train("cub-recall-at-k", "--data", tree("cub"), "--debug", "--out", tmp_path / "first") == 0
    folder = json.loads((tmp_path / "first" / "checkpoints" / "last.json").read_text())["folder"]
    weights = tmp_path / "trunk.safetensors"
    weights.write_bytes((tmp_path / "first" / "checkpoints" / folder / "weights.safetensors").read_bytes())
    command = ("cub-recall-at-k", "--data", tree("cub"), "--debug", "--weights", weights, "--schedule", "constant")
    assert train(*command, "--out", tmp_path / "run", "--epochs", 1) == 0
    weights.unlink()
    assert train("--resume", tmp_path / "run", "--epochs", 2) == 0
    assert cli.main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    # but a new run says what is missing
    assert train(*command, "--out", tmp_path / "new") == 2


def test_own_images_in_folders_or_a_list(tree, tmp_path, capsys):
    # six classes of five images: the batch is found from them
    for name, data in (("folder", tree("folder")), ("csv", tree("csv")), ("file", tree("csv") / "dataset.csv")):
        assert train("--data", data, "--loss", "fastap", "--debug", "--batch-size", 0, "--out", tmp_path / name) == 0
        saved = saved_recipe(tmp_path / name)
        assert (saved.loss, saved.data_set) == ("fastap", "folder" if name == "folder" else "csv")
        start = json.loads((tmp_path / name / "journal.jsonl").read_text().splitlines()[0])
        assert start["data"] == {"train": {"images": 30, "classes": 6}}
        assert start["steps_per_epoch"] == 1
    assert "query-gallery" in capsys.readouterr().out


def test_what_the_command_line_says_stands_in_a_debug_run(tree, tmp_path):
    assert train("cub-recall-at-k", "--data", tree("cub"), "--debug", "--dim", 8, "--epochs", 1, "--out", tmp_path / "run") == 0
    assert np.load(tmp_path / "run" / "eval" / "test" / "embeddings.npy").shape == (30, 8)


def test_a_run_is_tested_again(tree, tmp_path, capsys):
    run = tmp_path / "run"
    assert train("vehicleid-recall-at-k", "--data", tree("vehicleid"), "--debug", "--out", run) == 0
    path = run / "eval" / "small" / "result.json"
    first = path.read_text()
    path.unlink()
    # the folder remembers where the images are
    assert cli.main(["eval", str(run), "--split", "small", "--device", "cpu"]) == 0
    assert json.loads(path.read_text()) == json.loads(first)
    again = ["eval", str(run), "--split", "small", "--protocol", "vehicleid-official", "--device", "cpu"]
    assert cli.main(again) == 0
    assert json.loads(path.read_text()) == json.loads(first), "another protocol does not replace the run's own result"
    other = run / "eval" / "small@vehicleid-official" / "result.json"
    assert json.loads(other.read_text())["protocol"] == "vehicleid-official"
    capsys.readouterr()
    for wrong, message in (
        (["--split", "smal"], "cannot be tested on 'smal': choose one of small, medium, large"),
        (["--checkpoint", "best"], "no best checkpoint"),
        (["--protocol", "official"], "protocol must be one of"),
        (["--data", str(tmp_path / "nowhere")], "does not exist"),
    ):
        assert cli.main(["eval", str(run), *wrong, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


def test_damaged_run_folders_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        saved_recipe(tmp_path)
    for content, message in (
        ("{", "not a recipe"),
        ('{"name": "x"}', "settings"),
        ('{"name": "x", "settings": {"lrr": 1}}', "'lr'"),
    ):
        (tmp_path / "recipe.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            saved_recipe(tmp_path)


def test_a_choice_on_the_test_classes_is_labelled(tree, tmp_path):
    assert train("cub-rambo-log", "--data", tree("cub"), "--debug", "--out", tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["selected_on"] == "test"
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert "not on validation classes" in journal


def test_validation_classes_are_not_trained_on(tree):
    recipe = replace(find("cub-recall-at-k").debug_version(), validation="half")
    task = task_for(recipe, tree("cub"))
    part, validation = task.data.training(recipe)
    assert not set(part.labels) & set(validation.labels)
    assert set(part.labels) | set(validation.labels) == set(part.table.labels)
    assert part.images is validation.images, "images are decoded once"
    batches = task.make_batches()
    seen = {int(label) for epoch in range(3) for batch in _epoch(batches, epoch) for label in batch.labels}
    assert seen
    assert seen <= set(part.labels)


def test_selected_rows_are_embedded_as_rows_of_the_whole(tree):
    recipe = replace(find("cub-recall-at-k").debug_version(), validation="half")
    task = task_for(recipe, tree("cub"))
    model = task.make_model(pretrained=True)
    _, validation = task.data.training(recipe)
    whole = task.embed(model, replace(validation, rows=None))
    part = task.embed(model, validation)
    assert validation.rows.min() > 0
    torch.testing.assert_close(part, whole[validation.rows])
    assert validation.selected.paths == tuple(validation.table.paths[row] for row in validation.rows)


def test_a_sampler_within_rows():
    inner = make_sampler(RetrievalRecipe(name="x", batch_size=4, per_class=2), table([0, 0, 1, 1, 2, 2]))
    rows = np.array([7, 9, 3, 5, 11, 1])
    outer = SubsetSampler(inner, rows)
    outer.set_epoch(2)
    assert list(outer) == [rows[batch].tolist() for batch in inner]
    assert len(outer) == len(inner)


def _epoch(batches, epoch):
    batches.set_epoch(epoch)
    return list(batches.iterate(0))


def test_the_best_validation_checkpoint_is_tested(tree, tmp_path, monkeypatch, capsys):
    scores = iter([0.9, 0.1])
    monkeypatch.setattr(RetrievalTask, "evaluators", lambda _: {"validation": lambda model: {"R@1": next(scores)}})
    recipe = replace(find("cub-recall-at-k").debug_version(), validation="half")
    start_run(task_for(recipe, tree("cub")), RunFolder(tmp_path / "run"))
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert (best["epoch"], best["metrics"]["R@1"]) == (1, 0.9)
    assert "testing the best checkpoint" in capsys.readouterr().out
    # the tested embeddings are those of the best weights, which `eval` takes too, and not those of the last
    tested = np.load(tmp_path / "run" / "eval" / "test" / "embeddings.npy")
    for which, key, same in (("best", "test", True), ("last", "test@last", False)):
        assert cli.main(["eval", str(tmp_path / "run"), "--checkpoint", which, "--device", "cpu"]) == 0
        assert np.array_equal(np.load(tmp_path / "run" / "eval" / key / "embeddings.npy"), tested) == same
    assert np.array_equal(np.load(tmp_path / "run" / "eval" / "test" / "embeddings.npy"), tested), "its own result stays"


def test_settings_reach_the_loop():
    recipe = find("sop-recall-at-k")
    settings = recipe.train_settings()
    assert (settings.epochs, settings.steps, settings.milestones, settings.chunk_size) == (55, 0, (25, 50), 200)
    landmarks = find("gldv1-recall-at-k").train_settings()
    assert (landmarks.epochs, landmarks.steps, landmarks.schedule) == (0, 500, "exponential")
    assert replace(recipe, patience=3).train_settings().patience == 0, "nothing to be patient with"
    assert replace(recipe, patience=3, validation="half").train_settings().patience == 3


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sop-fastap-r50-m96", rg.FastAPLoss, rg.FastAPLoss(10)),
        ("inshop-rambo-log", rg.RamboRecallLoss, rg.RamboRecallLoss(0.2, 0.05, "log")),
        ("omniglot-rambo-ap", rg.RamboAPLoss, rg.RamboAPLoss(4.0, 0.02)),
        ("cars-smooth-ap-gem", rg.SmoothAPLoss, rg.SmoothAPLoss(0.01)),
        ("cars-recall-at-k", rg.RecallAtKLoss, rg.RecallAtKLoss()),
    ],
)
def test_a_recipe_makes_its_loss(name, kind, expected):
    loss = task_for(find(name)).make_loss()
    assert type(loss) is kind
    assert (loss.ranker, loss.objective) == (expected.ranker, expected.objective)


def test_simix_memory_and_the_query_in_the_database():
    simix = task_for(find("cars-recall-at-k-simix")).make_loss()
    assert isinstance(simix, rg.SiMix)
    assert simix.loss.objective.ks == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
    memory = task_for(find("sop-rambo-loglog-memory")).make_loss()
    assert isinstance(memory, rg.EmbeddingMemory)
    assert memory.size == 3
    embeddings, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    plain, compatible = (
        task_for(replace(find("cars-recall-at-k"), query_in_database=flag)).make_loss() for flag in (False, True)
    )
    assert compatible(embeddings, labels) > plain(embeddings, labels)


def test_samplers_follow_the_recipe():
    labels = np.repeat(np.arange(12), 6)
    rows = table(labels, categories=labels % 3, category_names=("a", "b", "c"))
    balanced = make_sampler(RetrievalRecipe(name="x", batch_size=12, per_class=3), rows)
    assert all(np.unique(labels[batch], return_counts=True)[1].tolist() == [3] * 4 for batch in balanced)
    hard = make_sampler(
        RetrievalRecipe(name="x", sampler="category-hard", batch_size=12, per_class=3, batches_per_pair=2), rows
    )
    assert len(hard) == 6
    assert all(len(np.unique(labels[batch] % 3)) == 2 for batch in hard)
    whole = make_sampler(RetrievalRecipe(name="x", sampler="whole-class", batch_size=12), rows)
    assert all(np.unique(labels[batch], return_counts=True)[1].tolist() == [6, 6] for batch in whole)
    with pytest.raises(ValueError, match="needs categories, and some/train has none: use --sampler class-balanced"):
        make_sampler(RetrievalRecipe(name="x", sampler="category-hard", batch_size=12), table(labels))


def test_the_largest_batch():
    recipe = RetrievalRecipe(name="x", per_class=4)
    assert largest_batch(recipe, table([*[0] * 4, *[1] * 9, *[2] * 3, *[3] * 4, *[-1] * 8])) == 12
    assert largest_batch(recipe, table(np.repeat(np.arange(2000), 4))) == 4000
    assert largest_batch(replace(recipe, per_class=3), table(np.repeat(np.arange(2000), 4))) == 3999
    with pytest.raises(ValueError, match="has 1 classes with at least 4 images"):
        largest_batch(recipe, table([0, 0, 0, 0, 1, 1]))


def test_the_comparison_has_differences_protocols_and_sources():
    result = evaluate(torch.eye(4), [0, 0, 1, 1], ks=(1, 2))
    found = {"test": RetrievalEvaluation("test", table([0, 0, 1, 1]), np.eye(4), result, result.protocol.name, ALONE)}
    published = (
        Published("R@1", 50.0, "Paper, Table 1"),
        Published("R@1", 99.0, "Paper, Table 9"),
        Published("R@2", None, "Paper, Table 1"),
        Published("R@1", 12.0, "Paper, Table 1", split="other"),
    )
    lines = comparison(found, published).splitlines()
    value = 100 * result["R@1"]
    assert re.fullmatch(
        rf"test +R@1 +{value:.1f} +[\d.]+ - [\d.]+ +50\.0 +{value - 50:+.1f} +all-vs-all +Paper, Table 1", lines[1]
    )
    assert re.fullmatch(r"test +R@2 +[\d.]+ +[\d.]+ - [\d.]+ +diverged +all-vs-all +Paper, Table 1", lines[2])
    assert not any("12.0" in line or "Table 9" in line for line in lines)
    assert any(re.fullmatch(r"test +mAP +[\d.]+ +[\d.]+ - [\d.]+ +all-vs-all", line) for line in lines)


def test_the_published_means_are_compared_too():
    class Landmarks:
        protocol, details, headline = "roxford", "", ()

        def __init__(self, metrics):
            self.metrics = metrics

        def intervals(self):
            return {}

    values = {"roxford5k": (0.6, 0.4), "roxford5k+r1m": (0.5, 0.3), "rparis6k": (0.8, 0.6), "rparis6k+r1m": (0.6, 0.4)}
    found = {split: Landmarks({"mAP[medium]": m, "mAP[hard]": h}) for split, (m, h) in values.items()}
    task = task_for(find("gldv1-recall-at-k"))
    text = comparison(found, task.published(), task.combine(found))
    assert re.search(r"^mean +mAP +52\.5 +53\.1 +-0\.6 ", text, re.MULTILINE)
    assert re.search(r"^mean\+r1m +mAP +45\.0 +41\.0 +\+4\.0 ", text, re.MULTILINE)
    del found["rparis6k+r1m"]
    assert "mean" not in comparison(found, task.published(), task.combine(found))


def test_whitening_sets_the_first_linear_layer(tree):
    recipe = replace(find("gldv1-recall-at-k").debug_version(), test_on=())
    task = task_for(recipe, tree("gldv1"))
    model = task.make_model(pretrained=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    remarks = whiten(task, model, task.data.split(recipe, "train"))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.linear.weight", "head.linear.bias"}
    assert len(remarks) == 1
    assert "more matching descriptors than dimensions" in remarks[0]
    assert model.training
    assert isinstance(model.head.linear, nn.Linear)


def test_the_direction_that_layer_norm_takes_away_is_not_remarked_on():
    recipe = find("glyphs-recall-at-k")
    task = task_for(recipe)
    assert whiten(task, task.make_model(pretrained=True), task.data.split(recipe, "train")) == []


def test_the_plan_needs_no_data(capsys):
    assert cli.main(["plan", "cub-recall-at-k", "--debug", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "batch of 9 images" in out
    assert "<- chosen" in out
    assert cli.main(["plan", "own-images", "--device", "cpu"]) == 2
    assert "give --data DIR or --batch-size N" in capsys.readouterr().err


def test_the_plan_of_real_batches_tells_an_epoch(tree, capsys):
    assert cli.main(["plan", "cub-rambo-log", "--debug", "--data", str(tree("cub")), "--device", "cpu", "--cache", "none"]) == 0
    assert re.search(r"an epoch of \d+ steps takes", capsys.readouterr().out)
