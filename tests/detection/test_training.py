"""Detectors in the training loop: rows, batches, debug runs from end to end, exact resumption, the report."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from detection.voc_tree import write_voc
from safetensors.torch import load_file
from torch.nn import functional as F

from rankgrad import LargeBatch, cli
from rankgrad.cli.train_commands import detect as main
from rankgrad.detection import DetectionAPLoss, Detections, draw_shapes
from rankgrad.detection.box_evaluation import PICTURES, evaluate_split, read_evaluation, worst_and_best
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.detection.detection_report import page
from rankgrad.detection.detection_task import load_detector, read_run, read_split
from rankgrad.detection.detector_training import DetectionBatches, DetectionObjective, RowDetector, detect, uncollate
from rankgrad.detection.faster_rcnn import build_detector
from rankgrad.recipes.catalogue import find, recipes_of
from rankgrad.runs.run_folder import RunFolder
from rankgrad.train.journal import entries


@pytest.fixture(scope="module")
def scenes():
    return draw_shapes("train", 8, size=96)


def tiny():
    return build_detector("tiny", 5, min_size=96, max_size=96, anchor_scale=4.0, proposals=60, regions=24)


def test_rows_and_objective_add_up_to_torchvisions_losses(scenes):
    *_, batch, labels = next(DetectionBatches(scenes, 4).iterate(0))
    model = RowDetector(tiny()).train()
    plain = tiny().train()
    plain.load_state_dict(model.detector.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = sum(plain(*uncollate(batch)).values())
        torch.manual_seed(0)
        value = DetectionObjective(F.cross_entropy, 5)(model(batch), labels)
    torch.testing.assert_close(value, wanted)
    value.backward()
    wanted.backward()
    for (name, ours), theirs in zip(model.detector.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=1e-4, atol=1e-6)


def test_the_objective_says_what_the_journal_wants(scenes):
    *_, batch, labels = next(DetectionBatches(scenes, 4).iterate(0))
    model, objective = RowDetector(tiny()).train(), DetectionObjective(DetectionAPLoss(), 5)
    rows = model(batch)
    value = objective(rows, labels)
    numbers = objective.diagnose(rows, labels)
    parts = [number for name, number in numbers.items() if name.startswith("loss_")]
    assert len(parts) == 4
    assert sum(parts) == pytest.approx(float(value.detach()), rel=1e-5)
    assert numbers["regions"] == 4 * 24
    assert 0 < numbers["positives"] < 48
    assert 0 < numbers["batch_mAP"] < 1
    # to look is not to train: the memory holds one call
    assert len(objective.classification_loss.classes.past) == 1


def test_a_batch_in_chunks_has_the_gradient_of_the_whole_batchs_regions(scenes):
    *_, batch, labels = next(DetectionBatches(scenes, 4).iterate(0))
    step = LargeBatch(RowDetector(tiny()).train(), DetectionObjective(DetectionAPLoss(), 5), chunk_size=2)
    report = step.check(batch, labels)
    assert report.exact, report


def test_batches_are_a_function_of_seed_epoch_and_step(scenes):
    def shown(start, epoch, **options):
        batches = DetectionBatches(scenes, 3, **options)
        batches.set_epoch(epoch)
        return [(step, numbers.tolist(), batch) for step, numbers, batch, _ in batches.iterate(start)]

    whole = shown(0, 1)
    assert [step for step, *_ in whole] == [0, 1, 2]
    assert sorted(number for _, numbers, _ in whole for number in numbers) == list(range(8))
    assert len(whole[-1][1]) == 2
    for (_, numbers, batch), (_, again, other) in zip(whole[1:], shown(1, 1), strict=True):
        assert numbers == again
        assert all(torch.equal(batch[name], other[name]) for name in batch)
    assert [numbers for _, numbers, _ in shown(0, 2)] != [numbers for _, numbers, _ in whole]
    assert [numbers for _, numbers, _ in shown(0, 1, seed=5)] != [numbers for _, numbers, _ in whole]


def test_a_mirrored_image_has_mirrored_boxes(scenes):
    straight, mirrored = (
        {number: item for _, numbers, batch, _ in DetectionBatches(scenes, 1, flip=flip).iterate(0)
         for number, item in zip(numbers.tolist(), zip(*uncollate(batch), strict=True), strict=True)}
        for flip in (False, True)
    )  # fmt: skip
    turned = 0
    for number, (image, target) in straight.items():
        other, boxes = mirrored[number][0], mirrored[number][1]["boxes"]
        if torch.equal(image, other):
            continue
        turned += 1
        assert torch.equal(image.flip(2), other)
        assert torch.equal(boxes[:, 0] + target["boxes"][:, 2], torch.full((len(boxes),), 96.0))
        assert torch.equal(boxes[:, 1::2], target["boxes"][:, 1::2])
    assert 0 < turned < len(scenes)


def test_difficult_objects_are_not_trained_on_unless_asked_for():
    many = draw_shapes("train", 120, size=96)
    hard = [number for number, scene in enumerate(many.scenes) if scene.difficult.any()][:2]
    chosen = many.select(hard)
    counts = [
        sum(int(labels.sum()) for *_, labels in DetectionBatches(chosen, 2, difficult=difficult).iterate(0))
        for difficult in (False, True)
    ]
    assert counts[1] - counts[0] == sum(int(scene.difficult.sum()) for scene in chosen.scenes) > 0


def test_boxes_come_back_in_the_pixels_of_the_image(scenes):
    detector = tiny()
    detector.roi_heads.score_thresh = 0.0
    found = detect(detector, scenes, device=torch.device("cpu"), batch_size=3)
    assert len(found) == len(scenes)
    assert max(each.boxes.max() for each in found if len(each.labels)) <= 96
    assert detector.training


@pytest.fixture(scope="module")
def debug_run(tmp_path_factory):
    """A recipe of table 5, shrunk, on drawn shapes."""
    folder = tmp_path_factory.mktemp("runs") / "ap"
    assert main(["train", "voc07-r50-rambo", "--debug", "--out", str(folder), "--device", "cpu", "--evaluate-every", "1"]) == 0
    return folder


def test_a_debug_run_leaves_the_files_of_any_run(debug_run):
    kinds = [entry["kind"] for entry in entries(debug_run / "journal.jsonl")]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"step", "epoch", "eval", "checkpoint"} <= set(kinds)
    start, *_ = entries(debug_run / "journal.jsonl")
    assert start["data"]["train"]["images"] == 12
    step = next(entry for entry in entries(debug_run / "journal.jsonl") if entry["kind"] == "step")
    assert {"loss", "lr", "images_per_second", "loss_classifier", "loss_objectness", "batch_mAP", "positives"} <= set(step)
    recipe = json.loads((debug_run / "recipe.json").read_text())
    assert recipe["task"] == "detection"
    assert recipe["debug"] is True
    assert recipe["settings"]["lam"] == 0.5
    result = json.loads((debug_run / "eval" / "test" / "result.json").read_text())
    assert set(result["metrics"]) == {"AP50", "AP50[all-point]"}
    assert set(result["per_category"]) == {"circle", "ring", "square", "triangle", "cross"}


def test_what_was_saved_judges_to_the_same_numbers(debug_run):
    tested, content = read_evaluation(debug_run, "test")
    assert tested.result.metrics() == pytest.approx(content["metrics"])
    assert len(tested.scenes) == content["images"] == 6
    assert sum(len(each.labels) for each in tested.found) > 0


def test_eval_again_gives_the_same_numbers_and_a_lower_threshold_more_boxes(debug_run, capsys):
    before = json.loads((debug_run / "eval" / "test" / "result.json").read_text())
    assert main(["eval", str(debug_run), "--device", "cpu"]) == 0
    after = json.loads((debug_run / "eval" / "test" / "result.json").read_text())
    assert after["metrics"] == before["metrics"]
    assert main(["eval", str(debug_run), "--device", "cpu", "--score-threshold", "0.9"]) == 0
    few = json.loads((debug_run / "eval" / "test@score_threshold=0.9" / "result.json").read_text())
    assert sum(c["detections"] for c in few["per_category"].values()) < sum(
        c["detections"] for c in before["per_category"].values()
    )
    assert main(["eval", str(debug_run), "--device", "cpu"]) == 0
    assert "its numbers mean nothing" in capsys.readouterr().out


def test_the_trained_detector_is_torchvisions(debug_run):
    detector, names = load_detector(debug_run)
    assert names[0] == "circle"
    assert not detector.training
    with torch.no_grad():
        (output,) = detector([torch.rand(3, 96, 96)])
    assert set(output) == {"boxes", "labels", "scores"}
    saved = load_file(debug_run / "checkpoints" / "step-00000006" / "weights.safetensors")
    weight = detector.roi_heads.box_predictor.cls_score.weight
    assert torch.equal(saved["detector.roi_heads.box_predictor.cls_score.weight"], weight)


def test_a_resumed_run_ends_as_one_that_never_stopped(debug_run, tmp_path):
    folder = tmp_path / "parts"
    flags = ["--device", "cpu", "--evaluate-every", "1"]
    assert main(["train", "voc07-r50-rambo", "--debug", "--out", str(folder), "--steps", "4", *flags]) == 0
    # in the middle of the second epoch, with two batches in memory
    assert main(["train", "--resume", str(folder), "--steps", "6", "--device", "cpu"]) == 0
    whole, parts = (load_file(f / "checkpoints" / "step-00000006" / "weights.safetensors") for f in (debug_run, folder))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [entry["kind"] for entry in entries(folder / "journal.jsonl")].count("resume") == 1
    with pytest.raises(ValueError, match=r"was started differently \(margin was 0.15 and is 0.3\)"):
        main(["train", "--resume", str(folder), "--margin", "0.3", "--device", "cpu"])
    assert read_run(RunFolder(folder))[0].margin == 0.15


def test_the_report_shows_classes_curves_and_boxes(debug_run, tmp_path):
    text = page([debug_run])
    for part in ("AP50 of each class", "Precision and recall", "circle, AP50", "not found", "Exact mAP of the sampled regions"):
        assert part in text
    assert text.count("data:image/jpeg;base64,") == len(list((debug_run / "eval" / "test" / "pictures").glob("*.jpg"))) > 0
    assert "http://" not in text
    assert "<script" not in text
    copied = shutil.copytree(debug_run, tmp_path / "other")
    out = tmp_path / "both.html"
    assert main(["report", str(debug_run), str(copied), "--out", str(out)]) == 0
    assert "2 detection runs compared" in out.read_text()


def test_runs_on_other_images_are_not_compared(debug_run, tmp_path):
    other = tmp_path / "other"
    flags = ["--device", "cpu", "--epochs", "1", "--milestones", "3", "--test-images", "4"]
    assert main(["train", "voc07-r50-rambo", "--debug", "--out", str(other), *flags]) == 0
    with pytest.raises(ValueError, match="were tested on different images: report them separately"):
        page([debug_run, other])


def test_pictures_are_those_with_most_mistakes_and_with_none():
    scenes = draw_shapes("test", 12, size=96)
    perfect = [Detections(s.boxes, s.labels, np.ones(len(s.labels), np.float32)) for s in scenes.scenes]
    nothing = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
    most = max(range(12), key=lambda i: (len(scenes.scenes[i].clear.labels), -i))
    perfect[most] = nothing
    chosen = worst_and_best(evaluate_split("test", scenes, perfect))
    assert chosen[0] == most
    assert len(chosen) == 1 + PICTURES
    assert len(set(chosen)) == len(chosen)


def test_a_folder_in_vocs_layout_with_an_empty_image_and_a_flat_box(tmp_path, capsys):
    images = {f"i{n}": [("ape", (5, 5, 40, 40)), ("bear", (20, 10, 60, 45), n == 1)] for n in range(5)}
    images["i0"] = []
    images["i4"].append(("ape", (3, 3, 3, 9)))
    write_voc(tmp_path / "set", images, {"train": list(images), "test": ["i1", "i2"]})
    run = tmp_path / "run"
    common = ["--debug", "--data", str(tmp_path / "set"), "--device", "cpu", "--epochs", "1", "--milestones", "3"]
    with pytest.raises(ValueError, match=r"i4\.xml: the box of a ape has no area"):
        main(["train", "cells-ce", "--out", str(run), "--no-skip-bad", *common])
    assert main(["train", "cells-ce", "--out", str(run), *common]) == 0
    told = capsys.readouterr().out
    assert "note: 1 images without an object (i0.xml)" in told
    assert "note: 1 objects skipped" in told
    assert "AP50" in told
    assert read_run(RunFolder(run))[1] == ("ape", "bear")


def test_a_study_compares_both_losses_and_goes_on_where_it_was(tmp_path, capsys):
    arguments = ["study", "shapes", "--debug", "--out", str(tmp_path), "--device", "cpu", "--epochs", "1", "--milestones", "3"]
    assert main([*arguments, "--seeds", "1"]) == 0
    table = (tmp_path / "shapes.md").read_text()
    assert table in capsys.readouterr().out + "\n"
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["cross-entropy", "AP loss"]
    assert main([*arguments, "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert "AP loss, seed 1" in told
    assert "seed 0" not in told
    rows = (tmp_path / "shapes.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2
    assert "±" in (tmp_path / "shapes.md").read_text()


def test_settings_are_chosen_on_validation_images(tmp_path):
    data = tmp_path / "set"
    names = [f"i{number}" for number in range(4)]
    lists = {"trainval": names[:3], "train": names[:2], "val": names[2:3], "test": names[3:]}
    write_voc(data, {name: [("ape", (3, 3, 30, 30))] for name in names}, lists)

    def shown(recipe):
        return [
            [scene.name.removesuffix(".jpg") for scene in read_split(recipe, data, split).scenes] for split in ("train", "test")
        ]

    assert shown(find("cells-ce", DetectionRecipe)) == [names[:3], names[3:]]
    choosing = find("cells-ce", DetectionRecipe).with_settings({"validation": True})
    assert shown(choosing) == [names[:2], names[2:3]]
    drawn = find("shapes-ce", DetectionRecipe).with_settings({"validation": True, "images": 1, "test_images": 1})
    assert shown(drawn) == [["train-00000"], ["val-00000"]]
    (data / "ImageSets" / "Main" / "val.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no ImageSets/Main/val\.txt to test on"):
        read_split(choosing, data, "test")


def test_the_rows_of_tables_5_and_8_are_there():
    numbers = {(n.source, n.value) for recipe in recipes_of(DetectionRecipe).values() for n in recipe.published}
    fifth = {74.2, 75.7, 80.4, 81.4, 82.4, 82.9, 83.2, 83.6}
    eighth = {74.2, 74.6, 75.2, 75.7, 74.3}
    assert numbers == {("RaMBO, Table 5", v) for v in fifth} | {("RaMBO, Table 8", v) for v in eighth}
    paper = find("voc07-r50-rambo", DetectionRecipe)
    assert (paper.lam, paper.margin, paper.memory, paper.batch_size, paper.lr, paper.epochs) == (0.5, 0.15, 7, 8, 0.1, 12)
    assert math.isclose((1 - paper.interclass) / paper.interclass, 2)
    assert find("voc0712-x101-32x4d-ce", DetectionRecipe).backbone == "resnext101_32x4d"


def test_recipes_are_listed_and_shown(capsys):
    assert main(["recipes", "resnet101"]) == 0
    assert re.findall(r"^\S+", capsys.readouterr().out, re.MULTILINE) == ["recipe", "voc0712-r101-ce", "voc0712-r101-rambo"]
    assert main(["recipes", "voc07-r50-rambo-lam-0.1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  AP50 +75\.2  test +RaMBO, Table 8$", shown, re.MULTILINE)
    assert "interclass" in shown


def test_the_plan_tells_step_and_loss(capsys):
    assert main(["plan", "shapes-rambo", "--debug", "--device", "cpu", "--batch-size", "2"]) == 0
    told = capsys.readouterr().out
    assert "batch of 2 images" in told
    assert "loss and its gradient" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "voc07-r50-ce", "--device", "cpu"], "the data set 'voc07' needs --data DIR"),
        (["train", "voc07-r50-cf"], "there is no recipe 'voc07-r50-cf': did you mean 'voc07-r50-ce'?"),
        (["train", "shapes-ce", "--lr", "fast"], "--lr must be a finite number, got 'fast'"),
        (["train", "shapes-ce", "--backbone", "resnet5"], "--backbone must be one of"),
        (["train", "shapes-ce", "--max-size", "64"], "--max-size must be at least --min-size"),
        (["train", "shapes-ce", "--schedule", "step", "--milestones", "9,3"], "--milestones must ascend, got 9, 3"),
        (["train", "shapes-ce", "--device", "toaster"], "--device must be cpu, cuda or cuda:N"),
        (["train", "shapes-ce", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["eval", "nowhere"], "is not the folder of a run"),
        (["report", "nowhere"], "is missing"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["detect", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["train"], "name the recipe; `rankgrad detect recipes` lists them"),
        (["train", "shapes-ce", "--epoch", "3"], "unknown flag --epoch: did you mean --epochs?"),
        (["study", "shape"], "there is no study 'shape': did you mean 'shapes'?"),
    ],
)
def test_unknown_words_are_answered_with_the_nearest(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_folder_that_is_used_is_not_overwritten(debug_run):
    with pytest.raises(ValueError, match="already exists and is not empty: resume the run in it with --resume"):
        main(["train", "shapes-ce", "--debug", "--out", str(debug_run), "--device", "cpu"])


def test_a_retrieval_run_is_refused(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "x", "settings": {}}))
    with pytest.raises(ValueError, match="it is a retrieval run: use `rankgrad train` and `rankgrad eval`"):
        load_detector(tmp_path)


def test_the_run_decides_on_its_task(debug_run, capsys):
    """`rankgrad eval` tests a detector too."""
    assert cli.main(["eval", str(debug_run), "--device", "cpu"]) == 0
    assert "AP50" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[" * 100_000, '{"task": "detection", "settings": {"lr": 1e999}}', "null"])
def test_a_hostile_recipe_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"recipe\.json is not a recipe that this version can read"):
        read_run(RunFolder(tmp_path))
