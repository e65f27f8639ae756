"""One HTML page about detection runs: AP of each class, precision and recall, images with right and wrong boxes."""

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad._files import replace_file
from rankgrad._messages import plural
from rankgrad.detection.box_evaluation import (
    LEFT_OUT,
    RIGHT,
    RULE,
    WRONG,
    ClassResult,
    DetectionEvaluation,
    read_evaluation,
    worst_and_best,
)
from rankgrad.detection.detection_recipe import METRIC
from rankgrad.report.charts import Bar, Series, bars, colour_of, dash_of, line
from rankgrad.report.learning_curves import curve, events, thinned
from rankgrad.report.markup import (
    Cell,
    Section,
    absent,
    document,
    element,
    number,
    paragraph,
    percent,
    signed,
    table,
    text,
)
from rankgrad.report.page import hardware, missing, settings
from rankgrad.report.run_reader import Run, read_runs

SPLIT = "test"
MOST_POINTS = 120
PARTS = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
# smallest score of a wrong box that is drawn: a detector reports a hundred boxes per image
SHOWN_SCORE = 0.3

Test = tuple[DetectionEvaluation, Mapping[str, Any]]


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write a page about the runs in `folders`; the others are compared with the first."""
    replace_file(path, page(folders))
    return path


def page(folders: Sequence[Path]) -> str:
    """The HTML document."""
    tests = [read_evaluation(folder, SPLIT) for folder in folders]
    for folder, test in zip(folders, tests, strict=True):
        if _data_of(test) != _data_of(tests[0]):
            raise ValueError(f"{folders[0]} and {folder} were tested on different images: report them separately")
    runs = read_runs(folders)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} detection runs compared"
    about = str(runs[0].recipe.get("what", "")) if len(runs) == 1 else ", ".join(run.name for run in runs)
    sections: list[Section] = [
        ("numbers", "Numbers", _numbers(runs, tests)),
        ("classes", "Classes", _classes(runs, tests)),
        ("curves", "Precision and recall", _curves(runs, tests)),
        ("pictures", "Pictures", _pictures(runs, folders, tests)),
        ("learning", "Learning curves", _learning(runs)),
        ("settings", "Settings", settings(runs)),
        ("hardware", "Hardware and versions", hardware(runs)),
        ("events", "Events", events(runs)),
        ("notes", "Notes", missing([], [note for _, content in tests for note in content.get("notes", [])])),
    ]
    return document(title, about, sections)


def _data_of(test: Test) -> object:
    """What must be equal for two results to be compared; older results have no fingerprint of their data."""
    evaluation, content = test
    return [(scene.name, scene.boxes.tolist(), scene.labels.tolist()) for scene in evaluation.scenes], content.get("protocol")


def _numbers(runs: Sequence[Run], tests: Sequence[Test]) -> str:
    parts = []
    if any(run.debug for run in runs):
        parts.append(paragraph("A debug run: everything in it was shrunk, and its numbers mean nothing.", class_="notice"))
    header: list[Cell] = ["run", "AP50", "AP50, all points", "published", "difference", "images", "objects"]
    rows: list[list[Cell]] = []
    for run, (tested, content) in zip(runs, tests, strict=True):
        metrics = tested.result.metrics()
        published = [] if run.debug else run.recipe.get("published") or []
        wanted = next((entry for entry in published if entry.get("metric") == METRIC), None)
        rows.append(
            [
                text(run.name),
                (percent(metrics[METRIC]), "n strong"),
                (percent(metrics[f"{METRIC}[all-point]"]), "n"),
                "" if wanted is None else text(f"{wanted['value']:.1f} ({wanted['source']})"),
                ("" if wanted is None else signed(100 * metrics[METRIC] - wanted["value"]), "n"),
                (number(float(content.get("images", 0))), "n"),
                (number(float(content.get("objects", 0))), "n"),
            ]
        )
    parts += [table(header, rows, class_="numbers"), paragraph(text(RULE), class_="quiet")]
    return "".join(parts)


def _classes(runs: Sequence[Run], tests: Sequence[Test]) -> str:
    results_of = [{each.name: each for each in tested.result.classes} for tested, _ in tests]
    first = sorted(results_of[0].values(), key=lambda each: -_or_zero(each))
    rows = []
    for each in first:
        values = [found[each.name].average_precision() if each.name in found else math.nan for found in results_of]
        rows.append(Bar(each.name, values, plural(each.objects, "object")))
    colours = [colour_of(index) for index in range(len(runs))]
    return bars(
        rows,
        [run.name for run in runs],
        title="AP50 of each class",
        about="11-point rule. A class without an object has none.",
        colours=colours,
    )


def _or_zero(each: ClassResult) -> float:
    value = each.average_precision()
    return -1.0 if math.isnan(value) else value


def _curves(runs: Sequence[Run], tests: Sequence[Test]) -> str:
    charts = []
    for label, name in enumerate(tests[0][0].class_names):
        series, told = [], []
        for index, (run, (tested, _)) in enumerate(zip(runs, tests, strict=True)):
            each = tested.result.classes[label] if label < len(tested.result.classes) else None
            if each is None or not each.objects or not len(each.recall):
                continue
            recall, precision = thinned(each.recall.tolist(), each.precision.tolist(), MOST_POINTS)
            # the recall that was not reached has precision 0
            recall, precision = [0.0, *recall, recall[-1], 1.0], [precision[0], *precision, 0.0, 0.0]
            title = run.name if len(runs) > 1 else ""
            series.append(Series(title, recall, precision, colour_of(index), dash_of(index) if len(runs) > 1 else ""))
            told.append(percent(each.average_precision()))
        if series:
            charts.append(
                line(
                    series,
                    title=f"{name}, AP50 {' / '.join(told)}",
                    x="recall",
                    y="precision, percent",
                    percent=True,
                    floor=0.0,
                    ceiling=1.0,
                )
            )
    return element("div", *charts, class_="charts") if charts else absent("There are no detections.")


def _pictures(runs: Sequence[Run], folders: Sequence[Path], tests: Sequence[Test]) -> str:
    told = (
        "Solid: right. Dashed: wrong, or a duplicate. Dotted: an object that was not found. Wrong boxes with a score below "
        f"{SHOWN_SCORE:g} are not drawn."
    )
    parts = [paragraph(told, class_="quiet")]
    for run, folder, (tested, _) in zip(runs, folders, tests, strict=True):
        if len(runs) > 1:
            parts.append(element("h3", text(run.name), class_="run"))
        drawn = []
        for image in worst_and_best(tested):
            path = folder / "eval" / SPLIT / "pictures" / f"{image:06}.jpg"
            if path.is_file():
                drawn.append(_picture(tested, image, path))
        parts.append(element("div", *drawn, class_="charts") if drawn else absent("The run has no pictures."))
    return "".join(parts)


def _picture(tested: DetectionEvaluation, image: int, path: Path) -> str:
    scene, found = tested.scenes[image], tested.found[image]
    verdicts, missed = tested.result.verdicts[image], tested.result.missed[image]
    source = f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
    marks = []
    for box, label, score, verdict in zip(found.boxes, found.labels, found.scores, verdicts, strict=True):
        if verdict == LEFT_OUT or (verdict == WRONG and score < SHOWN_SCORE):
            continue
        right = verdict == RIGHT
        tip = f"{tested.class_names[label - 1]} {score:.2f}, {'right' if right else 'wrong'}"
        marks.append(_box(box.tolist(), "accent" if right else "wrong", "" if right else "7 4", tip))
    for box, label in zip(scene.boxes[missed], scene.labels[missed], strict=True):
        marks.append(_box(box.tolist(), "red", "2 3", f"{tested.class_names[label - 1]}, not found"))
    counts = {"right": int((verdicts == RIGHT).sum()), "not found": int(missed.sum())}
    counts["wrong"] = int(((verdicts == WRONG) & (found.scores >= SHOWN_SCORE)).sum())
    about = ", ".join(f"{counts[word]} {word}" for word in ("right", "wrong", "not found"))
    return element(
        "figure",
        element("figcaption", element("b", text(scene.name)), f" {text(about)}"),
        f'<svg viewBox="0 0 {scene.width} {scene.height}" role="img"><title>{text(f"{scene.name}: {about}")}</title>'
        f'<image href="{source}" width="{scene.width}" height="{scene.height}" preserveAspectRatio="none"/>'
        f"{''.join(marks)}</svg>",
        class_="chart",
    )


def _box(box: Sequence[float], colour: str, dash: str, tip: str) -> str:
    x1, y1, x2, y2 = box
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x1:.1f}" y="{y1:.1f}" width="{x2 - x1:.1f}" height="{y2 - y1:.1f}" class="curve s-{colour}" '
        f'vector-effect="non-scaling-stroke" pointer-events="all"{dashes}><title>{text(tip)}</title></rect>'
    )


def _learning(runs: Sequence[Run]) -> str:
    if not any(run.entries("step") for run in runs):
        return absent("The journal has no steps yet.")
    charts = []
    for name, title, about, y in (
        ("loss", "Loss", "Classification, boxes and proposals together.", "loss"),
        ("batch_mAP", "Exact mAP of the sampled regions", "Of a batch, without margin or memory.", "percent"),
        *((part, part.removeprefix("loss_").replace("_", " "), "A part of the loss.", "loss") for part in PARTS),
        ("gradient", "Gradient norm", "Before clipping.", "norm"),
        ("images_per_second", "Speed", "Forward and backward, the loss included.", "images per second"),
    ):
        series = []
        for index, run in enumerate(runs):
            x, values = curve(run, name)
            if len(x):
                label = run.name if len(runs) > 1 else ""
                series.append(Series(label, x, values, colour_of(index), dash_of(index) if len(runs) > 1 else ""))
        if series:
            charts.append(line(series, title=title, about=about, x="step", y=y, percent=y == "percent"))
    tested = [_tests(run, index, len(runs)) for index, run in enumerate(runs)]
    known = [each for each in tested if each is not None]
    if known:
        charts.insert(1, line(known, title="AP50 of the test images", x="step", y="percent", percent=True))
    return element("div", *charts, class_="charts")


def _tests(run: Run, index: int, of: int) -> Series | None:
    points = {float(entry["step"]): entry.get("metrics", {}).get(METRIC, math.nan) for entry in run.entries("eval")}
    known = sorted((step, float(value)) for step, value in points.items() if np.isfinite(float(value)))
    if not known:
        return None
    x, y = [step for step, _ in known], [value for _, value in known]
    return Series(run.name if of > 1 else "", x, y, colour_of(index), dash_of(index) if of > 1 else "", dots=True)
