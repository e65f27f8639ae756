"""AP by the rules of VOC: cases worked out by hand, every rule once more in plain Python, and COCO's evaluation."""

import math

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from rankgrad.detection import Detections, Scene, evaluate_boxes
from rankgrad.detection.box_evaluation import LEFT_OUT, RIGHT, WRONG

UNIT = (0, 0, 10, 10)


def scene(*boxes, labels=None, difficult=None, name="a.jpg"):
    count = len(boxes)
    return Scene(
        name,
        200,
        200,
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(labels if labels is not None else [1] * count, np.int64),
        np.array(difficult if difficult is not None else [False] * count, np.bool_),
    )


def found(*boxes, scores=None, labels=None):
    count = len(boxes)
    scores = scores if scores is not None else [1 - 0.1 * i for i in range(count)]
    labels = labels if labels is not None else [1] * count
    return Detections(np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64), np.array(scores, np.float32))


def moved(box, by):
    return (box[0] + by, box[1], box[2] + by, box[3])


def judged(detections, scenes, names=("thing",), **options):
    return evaluate_boxes(detections, scenes, names, **options)


def test_all_found_and_nothing_else_is_1_by_both_rules():
    boxes = [moved(UNIT, 20 * i) for i in range(5)]
    result = judged([found(*boxes)], [scene(*boxes)])
    assert result.metrics() == {"AP50": 1.0, "AP50[all-point]": 1.0}
    assert not result.missed[0].any()


def test_the_two_rules_on_a_list_worked_out_by_hand():
    """Right, wrong, right, wrong of 4 objects: recalls .25 .25 .5 .5, precisions 1 1/2 2/3 1/2."""
    boxes = [moved(UNIT, 20 * i) for i in range(4)]
    detections = found(boxes[0], moved(UNIT, 150), boxes[1], moved(UNIT, 170))
    result = judged([detections], [scene(*boxes)])
    one = result.classes[0]
    assert one.recall.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert one.precision.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    # 0, .1, .2 reach precision 1; .3, .4, .5 reach 2/3; the rest nothing
    assert one.average_precision("11-point") == pytest.approx((3 * 1 + 3 * 2 / 3) / 11)
    assert one.average_precision("all-point") == pytest.approx(0.25 * 1 + 0.25 * 2 / 3)
    assert result.verdicts[0].tolist() == [RIGHT, WRONG, RIGHT, WRONG]
    assert result.missed[0].tolist() == [False, False, True, True]


def test_a_recall_of_three_tenths_reaches_the_third_tenth():
    """3 / 10 is just below 0.3 as some sums of floats have it."""
    boxes = [(0, 11 * i, 10, 11 * i + 10) for i in range(10)]
    result = judged([found(*boxes[:3])], [scene(*boxes)])
    assert result.classes[0].average_precision("11-point") == pytest.approx(4 / 11)


def test_a_second_box_on_an_object_is_wrong():
    result = judged([found(UNIT, UNIT, UNIT)], [scene(UNIT)])
    assert result.verdicts[0].tolist() == [RIGHT, WRONG, WRONG]
    assert result.classes[0].precision.tolist() == pytest.approx([1, 1 / 2, 1 / 3])


def test_a_box_whose_best_object_is_taken_does_not_take_the_next_best():
    """Here VOC and COCO differ: the second box overlaps both objects with more than 0.5, and the first one most."""
    near = moved(UNIT, 3)
    result = judged([found(UNIT, moved(UNIT, 1))], [scene(UNIT, near)])
    assert result.verdicts[0].tolist() == [RIGHT, WRONG]
    assert result.missed[0].tolist() == [False, True]


def test_difficult_objects_are_neither_found_nor_missed():
    far = moved(UNIT, 50)
    result = judged([found(far, far, UNIT)], [scene(UNIT, far, difficult=[False, True])])
    assert result.verdicts[0].tolist() == [LEFT_OUT, LEFT_OUT, RIGHT]
    assert result.metrics()["AP50"] == 1
    assert result.classes[0].objects == 1
    assert not result.missed[0].any()


def test_half_an_overlap_is_enough_and_less_is_not():
    half, less = (0, 0, 10, 20), (0, 0, 10, 20.1)
    assert judged([found(UNIT)], [scene(half)]).verdicts[0].tolist() == [RIGHT]
    assert judged([found(UNIT)], [scene(less)]).verdicts[0].tolist() == [WRONG]
    assert judged([found(UNIT)], [scene(less)], iou=0.4).metrics().keys() == {"AP40", "AP40[all-point]"}


def test_an_object_of_another_class_is_not_found_and_classes_are_averaged():
    both = scene(UNIT, moved(UNIT, 50), labels=[1, 2])
    result = judged([found(UNIT, moved(UNIT, 50), labels=[2, 2])], [both], names=("cat", "dog"))
    assert result.verdicts[0].tolist() == [WRONG, RIGHT]
    assert result.per_class()["cat"]["AP50"] == 0
    assert result.mean("all-point") == pytest.approx((0 + 0.5) / 2)


def test_a_class_never_present_has_no_ap_and_is_not_in_the_mean():
    result = judged([found(UNIT, labels=[1])], [scene(UNIT)], names=("cat", "dog"))
    assert math.isnan(result.classes[1].average_precision())
    assert result.absent == ("dog",)
    assert result.mean() == 1
    only_difficult = judged([found(UNIT)], [scene(UNIT, difficult=[True])])
    assert math.isnan(only_difficult.mean())


def test_images_without_objects_and_without_boxes():
    result = judged([found(), found(UNIT)], [scene(UNIT, name="a"), scene(name="b")])
    assert result.metrics()["AP50"] == 0
    assert result.verdicts[1].tolist() == [WRONG]
    assert judged([found()], [scene(UNIT)]).metrics() == {"AP50": 0.0, "AP50[all-point]": 0.0}


def slow(detections, scenes, label, rule):
    """The development kit's procedure in plain Python: one detection after another, one threshold after another."""

    def area(box):
        return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)

    def overlap(a, b):
        inner = (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
        shared = area(inner) if inner[0] < inner[2] and inner[1] < inner[3] else 0.0
        return shared / (area(a) + area(b) - shared)

    everything = [
        (-float(score), image, row)
        for image, each in enumerate(detections)
        for row, (name, score) in enumerate(zip(each.labels, each.scores, strict=True))
        if name == label
    ]
    objects = sum(int(n == label and not d) for s in scenes for n, d in zip(s.labels, s.difficult, strict=True))
    claimed, hits = set(), []
    for _, image, row in sorted(everything):
        box = [float(x) for x in detections[image].boxes[row]]
        best, where = 0.0, None
        for k, (other, name) in enumerate(zip(scenes[image].boxes, scenes[image].labels, strict=True)):
            if name == label and overlap(box, [float(x) for x in other]) > best:
                best, where = overlap(box, [float(x) for x in other]), k
        if where is None or best < 0.5:
            hits.append(False)
        elif not scenes[image].difficult[where]:
            hits.append((image, where) not in claimed)
            claimed.add((image, where))
    points = [(sum(hits[: i + 1]) / objects, sum(hits[: i + 1]) / (i + 1)) for i in range(len(hits))]
    if rule == "11-point":
        reached = [[p for r, p in points if r * 10 >= t - 1e-9] for t in range(11)]
        return sum(max(ps, default=0.0) for ps in reached) / 11
    steps = sorted({r for r, _ in points if r > 0})
    return sum((r - before) * max(p for q, p in points if q >= r) for before, r in zip([0.0, *steps], steps, strict=False))


@pytest.mark.parametrize("seed", range(12))
def test_random_boxes_against_plain_python(seed):
    random = np.random.default_rng(seed)
    scenes, detections = [], []
    for image in range(6):
        count = int(random.integers(0, 6))
        corner = random.uniform(0, 60, (count, 2))
        boxes = np.concatenate((corner, corner + random.uniform(5, 40, (count, 2))), axis=1)
        labels = random.integers(1, 4, count)
        scenes.append(scene(*boxes.tolist(), labels=labels, difficult=random.random(count) < 0.25, name=str(image)))
        # near the objects, several for some, and some nowhere
        source = [*boxes, *boxes, *random.uniform(0, 60, (2, 2)).repeat(2, axis=1)]
        shaken = [np.asarray(b) + random.normal(0, 3, 4) for b in source]
        shaken = [(min(b[0], b[2] - 1), min(b[1], b[3] - 1), b[2], b[3]) for b in shaken]
        names = [*labels, *labels, *random.integers(1, 4, 2)]
        detections.append(found(*shaken, labels=names, scores=random.random(len(shaken))))
    result = judged(detections, scenes, names=("a", "b", "c"))
    judged_right = 0
    for label, each in enumerate(result.classes, start=1):
        if each.objects:
            judged_right += int(each.recall[-1] * each.objects) if len(each.recall) else 0
            for rule in ("11-point", "all-point"):
                assert each.average_precision(rule) == pytest.approx(slow(detections, scenes, label, rule), abs=1e-9)
    assert judged_right > 3


def coco_ap(scenes, detections, label, recalls):
    """Mean over `recalls` of the best precision from there on, of one class at IoU 0.5."""
    known, given = [], []
    for image, (truth, boxes) in enumerate(zip(scenes, detections, strict=True)):
        for box in truth.boxes[truth.labels == label].tolist():
            x1, y1, x2, y2 = box
            area = (x2 - x1) * (y2 - y1)
            entry = {"image_id": image, "category_id": label, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area, "iscrowd": 0}
            known.append({"id": len(known) + 1, **entry})
        of_class = boxes.labels == label
        for (x1, y1, x2, y2), score in zip(boxes.boxes[of_class].tolist(), boxes.scores[of_class].tolist(), strict=True):
            given.append({"image_id": image, "category_id": label, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score})
    truths = COCO()
    truths.dataset = {"images": [{"id": i} for i in range(len(scenes))], "categories": [{"id": label}], "annotations": known}
    truths.createIndex()
    evaluation = COCOeval(truths, truths.loadRes(given), "bbox")
    evaluation.params.iouThrs = np.array([0.5])
    evaluation.params.recThrs = np.asarray(recalls)
    evaluation.params.maxDets = [1000]
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluation.evaluate()
    evaluation.accumulate()
    return float(evaluation.eval["precision"].mean())


@pytest.mark.parametrize("seed", range(5))
def test_both_rules_agree_with_cocos_evaluation(seed):
    """Where they must: no object overlaps another, so that no box could have taken a second best one, and none is difficult."""
    draws = np.random.default_rng(seed)
    scenes, detections = [], []
    for image in range(12):
        cells = draws.permutation(36)[: draws.integers(0, 9)]
        corners = np.stack((cells % 6, cells // 6), axis=1) * 30.0 + draws.uniform(2, 6, (len(cells), 2))
        sizes = draws.uniform(10, 20, (len(cells), 2))
        boxes = np.concatenate((corners, corners + sizes), axis=1)
        scenes.append(scene(*boxes, labels=draws.integers(1, 4, len(cells)), name=f"{image}.jpg"))
        # some found twice, some not at all, some somewhere else, and not all of the right class
        chosen = draws.integers(0, len(cells), 2 * len(cells)) if len(cells) else np.zeros(0, int)
        moved_boxes = boxes[chosen] + draws.normal(0, 2.5, (len(chosen), 4))
        stray = draws.uniform(0, 150, (4, 2))
        all_boxes = np.concatenate((moved_boxes, np.concatenate((stray, stray + draws.uniform(8, 30, (4, 2))), axis=1)))
        guessed = np.concatenate((scenes[-1].labels[chosen], draws.integers(1, 4, 4)))
        wrong = draws.random(len(guessed)) < 0.2
        guessed[wrong] = draws.integers(1, 4, wrong.sum())
        detections.append(found(*all_boxes, scores=draws.random(len(all_boxes)), labels=guessed))
    result = judged(detections, scenes, ("a", "b", "c"))
    for label, one in enumerate(result.classes, start=1):
        assert 0.05 < one.average_precision("11-point") < 0.95
        tenths, each = np.arange(11) / 10, np.arange(1, one.objects + 1) / one.objects
        assert one.average_precision("11-point") == pytest.approx(coco_ap(scenes, detections, label, tenths), abs=1e-9)
        assert one.average_precision("all-point") == pytest.approx(coco_ap(scenes, detections, label, each), abs=1e-9)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="found must be one per image, 2, got 1"):
        judged([found()], [scene(), scene()])
    with pytest.raises(ValueError, match=r"labels must be 1..1, got \[3\] in a.jpg"):
        judged([found(UNIT, labels=[3])], [scene(UNIT)])
    with pytest.raises(ValueError, match="scores must be finite"):
        found(UNIT, scores=[math.nan])
    with pytest.raises(ValueError, match="rule must be one of '11-point', 'all-point'"):
        judged([found(UNIT)], [scene(UNIT)]).classes[0].average_precision("12-point")
    with pytest.raises(ValueError, match=r"Scene a.jpg: a box must have an area"):
        scene((5, 5, 5, 9))
    with pytest.raises(ValueError, match=r"Scene a.jpg: boxes must lie in 200 x 200 pixels"):
        scene((5, 5, 300, 9))
