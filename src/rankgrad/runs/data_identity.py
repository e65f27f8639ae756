"""What data a run was started on, in few enough bytes to save, and what has changed since.

A digest for each class says more than one for all: which class was removed, renamed or added, and where images were replaced.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rankgrad._messages import plural, printable

# of a sentence that names classes
MOST_NAMED = 3


@dataclass(frozen=True)
class ClassIdentity:
    """The items of one class.

    Attributes:
        items: how many.
        paths: digest of paths, sizes and marks.
        files: digest of file names and sizes alone: the same for a class whose folder was renamed.
    """

    items: int
    paths: str
    files: str


@dataclass(frozen=True)
class DataIdentity:
    """One split.

    Attributes:
        fingerprint: digest of all of it.
        items: how many there are.
        classes: each class by name.
    """

    fingerprint: str
    items: int
    classes: Mapping[str, ClassIdentity]

    @classmethod
    def of(cls, fingerprint: str, items: Iterable[tuple[str, str, str]]) -> "DataIdentity":
        """From a digest of all of it, and (class name, path, what else decides: size, marks) of every item."""
        groups: dict[str, list[tuple[str, str]]] = {}
        count = 0
        for name, path, details in items:
            groups.setdefault(name, []).append((path, details))
            count += 1
        return cls(fingerprint, count, {name: _class_identity(group) for name, group in groups.items()})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "DataIdentity":
        """As `as_dict` wrote it."""
        classes = {
            str(name): ClassIdentity(int(items), str(paths), str(files))
            for name, (items, paths, files) in content["classes"].items()
        }
        return cls(str(content["fingerprint"]), int(content["items"]), classes)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        classes = {name: [found.items, found.paths, found.files] for name, found in self.classes.items()}
        return {"fingerprint": self.fingerprint, "items": self.items, "classes": classes}

    def changes(self, now: "DataIdentity") -> list[str]:
        """What is different in `now`, one phrase each; empty if nothing is."""
        if self == now:
            return []
        removed = {name: found for name, found in self.classes.items() if name not in now.classes}
        added = {name: found for name, found in now.classes.items() if name not in self.classes}
        renamed = {}
        for old, found in list(removed.items()):
            new = next((name for name, other in added.items() if other.files == found.files), None)
            if new is not None:
                renamed[f"{old!r} to {new!r}"] = removed.pop(old)
                added.pop(new)
        phrases = [
            f"{plural(len(names), 'class', 'classes')} {verb} ({_named(names)})"
            for verb, names in (("removed", list(removed)), ("added", list(added)), ("renamed", list(renamed)))
            if names
        ]
        kept = {name: (found, now.classes[name]) for name, found in self.classes.items() if name in now.classes}
        phrases += [
            f"{what} in {plural(len(names), 'class', 'classes')} ({_named(names)})"
            for what, names in _changed_items(kept).items()
            if names
        ]
        return phrases or ["labels, categories or the order of the images changed"]


def _class_identity(group: Sequence[tuple[str, str]]) -> ClassIdentity:
    paths, files = (hashlib.blake2b(digest_size=8) for _ in range(2))
    for path, details in sorted(group):
        paths.update(f"{path}\0{details}\0".encode(errors="surrogateescape"))
    for path, details in sorted((PurePosixPath(path).name, details) for path, details in group):
        files.update(f"{path}\0{details}\0".encode(errors="surrogateescape"))
    return ClassIdentity(len(group), paths.hexdigest(), files.hexdigest())


def _changed_items(kept: Mapping[str, tuple[ClassIdentity, ClassIdentity]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"images removed": [], "images added": [], "images moved": [], "images replaced": []}
    for name, (before, now) in kept.items():
        if before.items > now.items:
            found["images removed"].append(name)
        elif before.items < now.items:
            found["images added"].append(name)
        elif before.files != now.files:
            found["images replaced"].append(name)
        elif before.paths != now.paths:
            found["images moved"].append(name)
    return found


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return printable(", ".join(names[:MOST_NAMED]) + more)
