"""The images below a folder: which files count, and in which order. Links to files and folders are followed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# formats that Pillow reads, by their usual names
EXTENSIONS = frozenset((".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))


@dataclass(frozen=True)
class FolderEntries:
    """What one folder contains, by name and sorted; hidden entries are skipped.

    Attributes:
        folders: folders, and links to folders.
        images: files with the extension of an image.
        others: other files.
        undecodable: names that are not UTF-8.
    """

    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    undecodable: list[str] = field(default_factory=list)


def scan_folder(folder: Path) -> FolderEntries:
    """The entries of `folder`."""
    found = FolderEntries()
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            # bytes that are not UTF-8 become lone surrogates
            if any("\ud800" <= char <= "\udfff" for char in entry.name):
                found.undecodable.append(entry.name)
            elif entry.is_dir():
                found.folders.append(entry.name)
            elif Path(entry.name).suffix.lower() in EXTENSIONS:
                found.images.append(entry.name)
            else:
                found.others.append(entry.name)
    return found


def images_below(root: Path) -> Iterator[str]:
    """Paths of all images below `root`, relative to it: those of a folder first, then those of its folders.

    A link to a folder that contains it is skipped. A name that is not UTF-8 is a `ValueError`.
    """
    yield from _images_below(root, "", ())


def _images_below(root: Path, below: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    state = (root / below).stat()
    identity = state.st_dev, state.st_ino
    if identity in above:
        return
    found = scan_folder(root / below)
    for name in found.undecodable:
        raise ValueError(f"{str(root / below / name)!r}: the name is not UTF-8; rename it")
    prefix = f"{below}/" if below else ""
    yield from (f"{prefix}{name}" for name in found.images)
    for name in found.folders:
        yield from _images_below(root, f"{prefix}{name}", (*above, identity))
