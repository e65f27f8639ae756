"""The model card of a run: Markdown with YAML front matter, as the Hugging Face Hub reads it.

Everything on it comes from the folder of the run, except what only its author knows: the name, the licence of the weights.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankgrad._citations import citations_of
from rankgrad._messages import drop_empty_columns, markdown_table, plural
from rankgrad.report.headline import DEBUG_NOTICE, baseline, is_headline, published_of
from rankgrad.report.run_reader import Evaluation, Run


@dataclass(frozen=True)
class Modality:
    """What the items of a model are, and what the Hub calls such models."""

    noun: str
    task: str
    pipeline: str
    library: str


IMAGES = Modality("image", "image-retrieval", "image-feature-extraction", "rankgrad")
TEXTS = Modality("text", "text-retrieval", "sentence-similarity", "sentence-transformers")
# beside the first metrics of a report
OTHER_METRICS = ("MRR", "NDCG")
# classes that are listed by name
NAMED_CLASSES = 20


@dataclass(frozen=True)
class CardFacts:
    """What a card says besides the contents of the run folder.

    Attributes:
        name: of the model.
        checkpoint: "best" or "last".
        step: of the checkpoint.
        dim: dimensions of an embedding.
        parameters: of the network.
        preparation: the steps from an item to what the network is given.
        first_weights: what training began with, in a sentence.
        command: that trains it again.
        files: name and purpose of each file beside the card.
        licence: of the weights, as the Hub names it; "" where the author states none.
        modality: images or texts.
    """

    name: str
    checkpoint: str
    step: int
    dim: int
    parameters: int
    preparation: Sequence[str]
    first_weights: str
    command: str
    files: Mapping[str, str]
    licence: str = ""
    modality: Modality = IMAGES


def model_card(run: Run, facts: CardFacts) -> str:
    """The text of README.md."""
    tests = [test for test in run.evaluations.values() if test.checkpoint in ("", facts.checkpoint)]
    tests.sort(key=lambda test: (not test.is_own, test.key != test.split))
    sections = {
        "Use": _use(facts),
        "Results": "\n\n".join(_results(run, test, facts.modality.noun) for test in tests) or "The model has not been tested.",
        "Data": _data(run, facts),
        "Preprocessing": _numbered(facts.preparation),
        "Training": _training(run, facts),
        "Limits": _bullets(_limits(run, facts, tests)),
        "Licence of the weights": _licence(facts),
        "Citation": f"```bibtex\n{citations_of(str(run.settings.get('loss', '')), simix=bool(run.settings.get('simix')))}\n```",
        "Files": _bullets(f"`{name}`: {purpose}" for name, purpose in facts.files.items()),
    }
    head = [f"---\n{_front_matter(run, facts, tests)}\n---", f"# {facts.name}", _summary(run, facts)]
    if run.debug:
        head.append(f"**{DEBUG_NOTICE}**")
    return "\n\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]) + "\n"


def _front_matter(run: Run, facts: CardFacts, tests: Sequence[Evaluation]) -> str:
    from huggingface_hub import ModelCardData

    formats = [name for name in ("safetensors", "onnx") if any(file.endswith(name) for file in facts.files)]
    content = ModelCardData(
        license=facts.licence or None,
        library_name=facts.modality.library,
        pipeline_tag=facts.modality.pipeline,
        tags=[facts.modality.task, "metric-learning", "embeddings", *formats],
        model_name=facts.name,
        # of a debug run they mean nothing
        eval_results=[] if run.debug else list(_eval_results(run, tests, facts.modality)),
    )
    return str(content.to_yaml()).strip()


def _eval_results(run: Run, tests: Sequence[Evaluation], modality: Modality) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    data_set = str(run.settings.get("data_set", "unknown"))
    name = Path(str(run.recipe.get("data") or data_set)).stem
    for test in tests:
        for metric, value in test.metrics.items():
            if not is_headline(metric) or not math.isfinite(value):
                continue
            interval = test.intervals.get(metric)
            yield EvalResult(
                task_type=modality.task,
                task_name=f"{modality.noun.capitalize()} retrieval",
                dataset_type=data_set,
                dataset_name=f"{name} ({test.title})",
                dataset_split=test.split,
                dataset_revision=test.fingerprint,
                metric_type=re.sub(r"\W+", "_", metric.replace("R@", "recall_at_").lower()).strip("_"),
                metric_name=f"{metric} ({test.protocol})",
                metric_value=round(value, 4),
                metric_args=None if interval is None else {"interval_95": [round(bound, 4) for bound in interval]},
            )


def _summary(run: Run, facts: CardFacts) -> str:
    settings, noun = run.settings, facts.modality.noun
    trunk = str(settings.get("trunk"))
    trunk = Path(trunk).name if Path(trunk).is_absolute() else trunk
    return (
        f"An embedding network for {noun} retrieval: {'an' if noun == 'image' else 'a'} {noun} in, a vector of {facts.dim:,} "
        f"numbers and of length 1 out; the dot product of two vectors is the similarity of the {noun}s. The network is "
        f"{trunk}, {facts.parameters / 1e6:.1f} million parameters, trained on the loss `{settings.get('loss')}`."
    )


def _use(facts: CardFacts) -> str:
    if facts.modality is TEXTS:
        lines = [
            "```python",
            "from sentence_transformers import SentenceTransformer",
            "",
            'model = SentenceTransformer("path/to/this/folder")',
            f'embeddings = model.encode(["a text", "another text"])  # [2, {facts.dim}], of length 1',
            "model.similarity(embeddings, embeddings)",
            "```",
        ]
        return "\n".join(lines)
    parts = [
        "```python",
        "import rankgrad as rg",
        "",
        'model = rg.load("path/to/this/folder")',
        f'model.embed("image.jpg")  # [{facts.dim}], of length 1; lists and folders, too',
        'model.search("image.jpg", "folder/of/images", k=5)  # the nearest images: score, label, path',
        "```",
    ]
    if any(file.endswith(".onnx") for file in facts.files):
        parts += [
            "",
            "Without rankgrad and torch:",
            "",
            "```python",
            "import onnxruntime",
            "from preprocess import preprocess  # beside model.onnx",
            "",
            'session = onnxruntime.InferenceSession("model.onnx")',
            '(embeddings,) = session.run(["embeddings"], {"pixels": preprocess("image.jpg")})',
            "```",
        ]
    return "\n".join(parts)


def _results(run: Run, test: Evaluation, noun: str) -> str:
    before, published = baseline(run, test), published_of(run, test)
    rows = []
    for metric, value in test.metrics.items():
        if not math.isfinite(value) or not (is_headline(metric) or metric in OTHER_METRICS or metric in published):
            continue
        interval = test.intervals.get(metric)
        paper = next((entry for entry in published.get(metric, ()) if isinstance(entry.get("value"), (int, float))), None)
        rows.append(
            (
                metric,
                f"{100 * value:.1f}",
                "" if interval is None else " - ".join(f"{100 * bound:.1f}" for bound in interval),
                "" if before is None or metric not in before.metrics else f"{100 * before.metrics[metric]:.1f}",
                "" if paper is None else f"{paper['value']:.1f} ({paper.get('source', '')})",
            )
        )
    header = ("metric", "this model", "95% interval", "untrained", "published by others")
    skipped = f", {test.skipped:,} more without a relevant {noun}" if test.skipped else ""
    told = f"Protocol **{test.protocol}**" + (f": {test.rule}" if test.rule else "")
    told = (
        f"{told.rstrip('.')}. {plural(test.count, 'query', 'queries')}{skipped}. In percent; the intervals are a bootstrap "
        f"over queries.{'' if before is None else ' Untrained: the same network before training.'}"
    )
    return "\n\n".join(
        [
            f"### {test.title}",
            told,
            markdown_table(*drop_empty_columns(header, rows)),
            *test.notes,
        ]
    )


def _data(run: Run, facts: CardFacts) -> str:
    noun, where = facts.modality.noun, ", see recipe.json" if "recipe.json" in facts.files else ""
    settings = run.settings
    rows = []
    for split, found in run.data.items():
        classes = found.get("classes") if isinstance(found, Mapping) else None
        if isinstance(classes, Mapping):
            rows.append((split, f"{found.get('items', 0):,}", f"{len(classes):,}", f"`{found.get('fingerprint', '')}`"))
    parts = [
        f"{noun.capitalize()}s in the layout `{settings.get('data_set')}`"
        + (", an incomplete copy." if settings.get("partial") else ".")
    ]
    if rows:
        parts.append(markdown_table(("split", f"{noun}s", "classes", "fingerprint"), rows, align="lrrl"))
    names = run.recipe.get("class_names")
    for split, classes in names.items() if isinstance(names, Mapping) else ():
        listed = [str(name) for name in classes.values()] if isinstance(classes, Mapping) else []
        if listed:
            more = f" and {len(listed) - NAMED_CLASSES:,} more{where}" if len(listed) > NAMED_CLASSES else ""
            parts.append(f"Classes of {split}: {', '.join(map(_plain, listed[:NAMED_CLASSES]))}{more}.")
    return "\n\n".join(parts)


def _training(run: Run, facts: CardFacts) -> str:
    settings = run.settings
    shown = [
        *("loss", "sampler", "batch_size", "per_class", "trunk", "pool", "dim", "size"),
        *("optimizer", "lr", "weight_decay", "epochs", "precision", "seed"),
    ]
    images_only = ("pool", "size") if facts.modality is TEXTS else ()
    rows = [
        (name, f"`{Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value}`")
        for name in shown
        if name not in images_only and (value := settings.get(name)) is not None
    ]
    start = next(iter(run.entries("start")), {})
    versions, hardware = start.get("versions"), start.get("hardware")
    told = "; recipe.json has all settings" if "recipe.json" in facts.files else ""
    parts = [
        f"{facts.first_weights} These are the {facts.checkpoint} weights, step {facts.step:,}{told}.",
        markdown_table(("setting", "value"), rows, align="ll"),
        f"```\n{facts.command}\n```",
    ]
    if isinstance(versions, Mapping) and isinstance(hardware, Mapping):
        used = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts.append(f"Trained with {used} on {hardware.get('gpu') or hardware.get('device')}.")
    return "\n\n".join(parts)


def _limits(run: Run, facts: CardFacts, tests: Sequence[Evaluation]) -> Iterator[str]:
    if run.best is not None and facts.checkpoint == "best":
        selected = str(run.best.get("selected_on", ""))
        if selected in {test.split for test in tests}:
            yield f"The weights were selected on {selected} itself, so the numbers on it are too high."
    train, test = (_class_names(run, split) for split in ("train", "test"))
    if train and test:
        seen = len(train & test)
        yield (
            "No class of the test is among the training classes."
            if not seen
            else f"{plural(seen, 'class', 'classes')} of the test {'was' if seen == 1 else 'were'} trained on."
        )
    yield (
        "The intervals say how much the numbers depend on the choice of queries, not how much they would vary with another "
        "seed: this is one training run."
    )
    nouns = f"{facts.modality.noun}s"
    yield f"{nouns.capitalize()} unlike those of the data above were not tested; measure on your own with `rankgrad eval`."
    yield "Scores are cosines, not probabilities: a threshold must be chosen on data."
    if ":" in str(run.settings.get("trunk", "")):
        yield "The trunk is Python code that is not in this folder: install it, and load the model with `trust_code=True`."


def _class_names(run: Run, split: str) -> set[str]:
    found = run.data.get(split)
    classes = found.get("classes") if isinstance(found, Mapping) else None
    return set(map(str, classes)) if isinstance(classes, Mapping) else set()


def _licence(facts: CardFacts) -> str:
    stated = f"`{facts.licence}`." if facts.licence else "Not stated. Ask the author before you use or share them."
    data = f"{facts.modality.noun}s trained on"
    return f"{stated} {facts.first_weights} The terms of those weights and of the {data} may apply, too."


def _numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _bullets(lines: "Iterator[str] | Sequence[str]") -> str:
    return "\n".join(f"- {line}" for line in lines)


def _plain(name: str) -> str:
    """A name that Markdown does not take for markup."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(name.split()))
