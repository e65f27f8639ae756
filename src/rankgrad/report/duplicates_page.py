"""The page about near-duplicates and likely label errors."""

from collections.abc import Sequence

from rankgrad._messages import plural
from rankgrad.report.markup import absent, cut_middle, document, element, paragraph, percent, text
from rankgrad.report.run_reader import ItemTable
from rankgrad.report.thumbnails import LABEL_LETTERS, Thumbnails

Group = Sequence[tuple[int, float]]
"""Row and cosine with the nearest image of the group."""
Suspect = tuple[int, str, float, Sequence[tuple[int, float]]]
"""Row, suggested label, agreement, and the neighbours with their cosines."""


def duplicates_page(
    title: str,
    table: ItemTable,
    groups: Sequence[Group],
    suspects: Sequence[Suspect],
    *,
    threshold: float,
    most: int,
    pictures: Thumbnails | None = None,
) -> str:
    """One HTML document with a row of pictures for each group and each suspect.

    Args:
        title: name of the data.
        table: the images.
        groups: near-duplicates, the most similar first.
        suspects: likely label errors, the surest first.
        threshold: cosine that made the groups.
        most: groups and suspects that are shown.
        pictures: where thumbnails come from.
    """
    pictures = pictures or Thumbnails()
    copies = sum(len(group) - 1 for group in groups)
    about = (
        f"{plural(len(table), table.noun)}, {plural(copies, 'near-duplicate')}, {plural(len(suspects), 'likely label error')}"
    )
    sections = [
        ("labels", "Likely label errors", _suspects(table, suspects[:most], len(suspects), pictures)),
        ("duplicates", "Near-duplicates", _groups(table, groups[:most], len(groups), threshold, pictures)),
    ]
    remarks = pictures.remarks()
    if remarks:
        sections.append(("missing", "What is missing", element("ul", *(element("li", text(each)) for each in remarks))))
    return document(title, about, sections)


def _suspects(table: ItemTable, suspects: Sequence[Suspect], total: int, pictures: Thumbnails) -> str:
    if not suspects:
        return absent(f"Every labelled {table.noun} has a neighbour with its own label.")
    rows = []
    for row, suggested, agreement, near in suspects:
        says = f"labelled {table.caption(row)}", f"neighbours: {suggested} ({percent(agreement, 0)}%)"
        rows.append(_row(table, row, says, near, pictures))
    return paragraph(
        text(_shown(len(suspects), total, f"{table.noun} whose nearest neighbours all carry another label"))
    ) + "".join(rows)


def _groups(table: ItemTable, groups: Sequence[Group], total: int, threshold: float, pictures: Thumbnails) -> str:
    if not groups:
        return absent(f"No two {table.noun}s have a cosine of {threshold:g} or more.")
    rows = []
    for group in groups:
        (row, _), *others = group
        labels = {table.labels[each] for each, _ in group}
        says = (table.caption(row), "labels differ") if len(labels) > 1 else (table.caption(row),)
        rows.append(_row(table, row, says, others, pictures))
    return paragraph(
        text(_shown(len(groups), total, f"group of {table.noun}s with a cosine of {threshold:g} or more"))
    ) + "".join(rows)


def _shown(shown: int, total: int, what: str) -> str:
    head, rest = what.split(" ", 1)
    found = plural(total, what, f"{head}s {rest}")
    return f"{found}." if shown == total else f"{found}; the first {shown:,} are shown, the CSV file has all."


def _row(table: ItemTable, row: int, told: Sequence[str], near: Sequence[tuple[int, float]], pictures: Thumbnails) -> str:
    name = element("small", text(cut_middle(table.paths[row], 40)), title=table.paths[row])
    query = element("div", pictures.of(table, row), *(element("b", text(each)) for each in told), name, class_="query")
    items = []
    for other, cosine in near:
        same = table.labels[other] == table.labels[row]
        caption = element("span", text(cut_middle(table.caption(other), LABEL_LETTERS)), title=table.paths[other])
        items.append(
            element(
                "li", pictures.of(table, other), caption, element("small", f"{cosine:.3f}"), class_="right" if same else "wrong"
            )
        )
    return element("div", query, element("ol", *items), class_="found")
