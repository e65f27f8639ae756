"""The page about retrieval runs."""

from collections.abc import Callable, Sequence

from rankgrad.report.comparison import won_and_lost
from rankgrad.report.document import Section, document
from rankgrad.report.examples import best_and_worst, confusion_cards
from rankgrad.report.headline import description, numbers, side_by_side
from rankgrad.report.learning_curves import diagnostics, events, learning
from rankgrad.report.markup import element, paragraph, text
from rankgrad.report.provenance import hardware, missing, settings
from rankgrad.report.retrieval_sections import categories, embedding_map, ranks
from rankgrad.report.run_reader import Evaluation, Run
from rankgrad.report.thumbnails import Pictures

ROWS_ALONE, ROWS_EACH = 5, 3


def page(runs: Sequence[Run], *, split: str | None = None, pictures: Pictures | None = None) -> str:
    """One HTML document about one run, or about several beside each other.

    Args:
        runs: the first is what the others are compared with.
        split: the test that curves and pictures are of, by default "test" or the first there is.
        pictures: where thumbnails come from.
    """
    pictures = pictures or Pictures()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    about = description(runs[0]) if len(runs) == 1 else ", ".join(run.name for run in runs)
    return document(title, about, _sections(runs, split, pictures))


def _sections(runs: Sequence[Run], split: str | None, pictures: Pictures) -> list[Section]:
    alone = len(runs) == 1
    sections = [
        ("numbers", "Numbers", numbers(runs[0], split) if alone else side_by_side(runs)),
        ("learning", "Learning curves", learning(runs)),
        ("diagnostics", "Diagnostics", diagnostics(runs)),
        ("ranks", "Ranks", ranks(runs, split)),
        ("categories", "Categories", categories(runs, split)),
    ]
    if not alone:
        sections.append(("exchange", "Won and lost", won_and_lost(runs[0], runs[1:], split, pictures)))
    each = ROWS_ALONE if alone else ROWS_EACH
    sections += [
        ("queries", "Queries", _of_each(runs, split, lambda test: best_and_worst(test, pictures, each=each))),
        ("confusions", "Confusions", _of_each(runs, split, lambda test: confusion_cards(test, pictures))),
        ("map", "Map of the embeddings", embedding_map(runs, split)),
        ("settings", "Settings", settings(runs)),
        ("hardware", "Hardware and versions", hardware(runs)),
        ("events", "Events", events(runs)),
    ]
    # last, when all pictures were asked for
    return [*sections, ("missing", "What is missing", missing(runs, pictures.remarks()))]


def _of_each(runs: Sequence[Run], split: str | None, content: Callable[[Evaluation], str]) -> str:
    parts = []
    for run in runs:
        test = run.evaluation(split)
        if len(runs) > 1:
            parts.append(element("h3", text(run.name), class_="run"))
        parts.append(content(test) if test else paragraph("Not tested yet.", class_="absent"))
    return "".join(parts)
