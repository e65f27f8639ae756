"""What happens to files: on disks, in transfers, in editors, and in the hands of people who mean harm."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# what stands for a path that leads out of its folder
OUTSIDE = ("/etc/passwd", "../../../etc/passwd", "a/../../b.jpg", "\\\\server\\share\\x.jpg", "C:\\x.jpg", "..")

# values that JSON can hold and nobody expects
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "../../etc", "/etc/passwd"),
    *("step-x", "a\0b", "x" * 5000, "<script>alert(1)</script>", [], [1, [2]], {}, {"x": {"y": None}}),
)


def put(path: Path, content: bytes) -> None:
    """Writes a file of its own, also where `path` is another name of one that others use."""
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def remove(path: Path) -> None:
    """Whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_tree(source: Path, target: Path) -> Path:
    """A copy that shares its bytes with the source: change files by `put` only."""
    return Path(shutil.copytree(source, target, copy_function=os.link, symlinks=True))


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and what came of it; never what it was."""
    while True:
        name = rng.choice(tuple(_DAMAGES))
        result = _DAMAGES[name](content, rng)
        if result != content:
            return name, result


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(max(len(content), 1))]


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 3, 30)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, rng: random.Random, filling: Callable[[int], bytes]) -> bytes:
    start = rng.randrange(max(len(content), 1))
    length = rng.choice((1, 16, 600, 4096))
    return content[:start] + filling(length) + content[start + length :]


def _head(content: bytes, rng: random.Random) -> bytes:
    """The first bytes say how long everything is."""
    length = rng.randrange(1, 65)
    return rng.choice((b"\xff" * length, b"\0" * length, rng.randbytes(length))) + content[length:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(max(len(content), 1))
    return content[:start] + content[start : start + 500] + content[start:]


_DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "emptied": lambda content, rng: b"",
    "cut off": _cut,
    "bits flipped": _flip,
    "zeros in it": lambda content, rng: _overwrite(content, rng, bytes),
    "noise in it": lambda content, rng: _overwrite(content, rng, rng.randbytes),
    "a piece gone": lambda content, rng: _overwrite(content, rng, lambda length: b""),
    "a piece twice": _repeat,
    "another head": _head,
    "something after it": lambda content, rng: content + rng.randbytes(rng.choice((1, 1000))),
    "all noise": lambda content, rng: rng.randbytes(rng.choice((1, 100, 5000))),
    "all zeros": lambda content, rng: bytes(max(len(content), 1)),
    "all text": lambda content, rng: b"<!DOCTYPE html><title>404</title>" * rng.choice((1, 200)),
}


def replaced(path: Path, rng: random.Random) -> str:
    """Puts something else in the place of a file: nothing, a folder, a pipe, a link to itself, a device."""
    remove(path)
    what = rng.choice(("missing", "a folder", "a pipe", "a link to itself", "a link to nowhere", "a device"))
    match what:
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a link to itself":
            path.symlink_to(path.name)
        case "a link to nowhere":
            path.symlink_to("nowhere")
        case "a device":
            path.symlink_to("/dev/zero")
    return what


class MaliciousPickle:
    """A pickle of it runs a program where it is trusted: the program leaves `canary` behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


def malicious_pickle(canary: Path, rng: random.Random, around: object = None) -> bytes:
    """A pickle with a program in it, alone or somewhere in an honest value."""
    payload = MaliciousPickle(canary)
    value: object = rng.choice((payload, [payload], {"state_dict": payload}, {"a": 1, "b": (payload,)}))
    if isinstance(around, dict):
        value = {**around, rng.choice(sorted(around)): payload}
    return pickle.dumps(value, protocol=rng.choice((0, 2, 4)))


def malformed_lines(lines: Sequence[str], rng: random.Random, separator: str | None = None) -> tuple[str, bytes, bool]:
    """A list file gone wrong: what was done, the file, and whether a reader must refuse it.

    Args:
        lines: of the good file.
        rng: decides.
        separator: of columns; None is white space, "" means that a line is one column.
    """
    name = rng.choice(tuple(_LINE_DAMAGES))
    kept = list(lines)
    row = rng.randrange(len(kept)) if kept else 0
    damaged = _LINE_DAMAGES[name](kept, row, separator, rng)
    return f"{name} (line {row + 1})", damaged, name in MUST_BE_REFUSED


def _fields(line: str, separator: str | None) -> list[str]:
    return [line] if separator == "" else line.split(separator)


def _joined(fields: Sequence[str], separator: str | None) -> str:
    return (separator or " ").join(fields)


def _file(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _with_field(value: Callable[[str, random.Random], str]) -> "LineDamage":
    def change(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
        fields = _fields(lines[row], separator)
        column = rng.randrange(len(fields)) if fields else 0
        fields[column : column + 1] = [value(fields[column] if fields else "", rng)]
        lines[row] = _joined(fields, separator)
        return _file(lines)

    return change


def _all_fields(value: str) -> "LineDamage":
    def change(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
        lines[row] = _joined([value] * len(_fields(lines[row], separator)), separator)
        return _file(lines)

    return change


def _column_gone(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    fields = _fields(lines[row], separator)
    del fields[rng.randrange(len(fields)) :]
    lines[row] = _joined(fields, separator)
    return _file(lines)


def _column_gone_everywhere(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    column = rng.randrange(max(len(_fields(line, separator)) for line in lines))
    kept = [[value for i, value in enumerate(_fields(line, separator)) if i != column] for line in lines]
    return _file([_joined(fields, separator) for fields in kept])


def _more_columns(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    lines[row] = _joined([lines[row], *["x"] * rng.choice((1, 5, 3000))], separator)
    return _file(lines)


def _outside(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    fields = _fields(lines[row], separator)
    places = [i for i, value in enumerate(fields) if "/" in value or "." in value] or [len(fields) - 1]
    fields[rng.choice(places)] = rng.choice(OUTSIDE)
    lines[row] = _joined(fields, separator)
    return _file(lines)


def _spliced(piece: bytes) -> "LineDamage":
    def change(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
        content = bytearray(_file(lines))
        start = rng.randrange(len(content))
        content[start:start] = piece
        return bytes(content)

    return change


def _twice(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    return _file([*lines, lines[row]])


def _first_column_twice(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    fields, other = _fields(lines[row], separator), _fields(rng.choice(lines), separator)
    fields[:1] = other[:1]
    lines[row] = _joined(fields, separator)
    return _file(lines)


def _shuffled(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    rng.shuffle(lines)
    return _file(lines)


def _without(lines: list[str], row: int, separator: str | None, rng: random.Random) -> bytes:
    del lines[row]
    return _file(lines)


LineDamage = Callable[[list[str], int, str | None, random.Random], bytes]
_NUMBERS = ("-1", "0", "1.5", "1e3", "nan", "9" * 19, "9" * 400, "9" * 5000, "0x10", "\u0663", "1_000", "+1", "")
_LINE_DAMAGES: Mapping[str, LineDamage] = {
    "a column gone": _column_gone,
    "a column gone everywhere": _column_gone_everywhere,
    "more columns": _more_columns,
    "a path to the outside": _outside,
    "another number": _with_field(lambda value, rng: rng.choice(_NUMBERS)),
    "another text": _with_field(lambda value, rng: rng.choice(("x", "\u00e9", "a,b", "\u202e", "%s%n", "{0.__class__}", "'"))),
    "an escape sequence": _with_field(lambda value, rng: f"\x1b[2J{value}"),
    "a long value": _with_field(lambda value, rng: "x" * rng.choice((300, 5000, 60_000))),
    "an open quote": _with_field(lambda value, rng: f'"{value}'),
    "a line of nothing": _all_fields(""),
    "a line of zeros": _all_fields("0"),
    "a line of dots": _all_fields("."),
    "a huge line": _spliced(b"y" * 200_000),
    "a NUL byte": _spliced(b"\0"),
    "no UTF-8": _spliced(b"\xe9\xff"),
    "a lone surrogate": _spliced(b"\xed\xa0\x80"),
    "carriage returns": lambda lines, row, separator, rng: _file(lines).replace(b"\n", b"\r\n"),
    "old Mac line ends": lambda lines, row, separator, rng: _file(lines).replace(b"\n", b"\r"),
    "UTF-16": lambda lines, row, separator, rng: _file(lines).decode().encode("utf-16"),
    "a byte order mark": lambda lines, row, separator, rng: b"\xef\xbb\xbf" + _file(lines),
    "no line end": lambda lines, row, separator, rng: _file(lines).rstrip(b"\n"),
    "a line twice": _twice,
    "an id twice": _first_column_twice,
    "a line gone": _without,
    "lines shuffled": _shuffled,
    "no lines": lambda lines, row, separator, rng: b"",
    "one line": lambda lines, row, separator, rng: _file(lines[:1]),
    "one long line": lambda lines, row, separator, rng: _file([" ".join(lines)] * 50),
    "damaged bytes": lambda lines, row, separator, rng: damaged(_file(lines), rng)[1],
}
MUST_BE_REFUSED = frozenset({"a huge line", "a NUL byte", "no UTF-8", "a lone surrogate", "UTF-16", "a line twice", "no lines"})


def changed_json(content: Any, rng: random.Random) -> tuple[str, bytes]:
    """An object with one value of another kind, missing or added, or text that is no such object."""
    draw = rng.random()
    if draw < 0.15:
        text = rng.choice(("", "{", "[]", "null", '"x"', "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ufeff{}", "{'a': 1}"))
        return f"the text {text[:10]!r}", text.encode()
    if draw < 0.3:
        return damaged(json.dumps(content).encode(), rng)
    where, owner, key = random_entry(content, rng)
    if rng.random() < 0.25:
        del owner[key]
        return f"{where} gone", json.dumps(content).encode()
    owner[key] = rng.choice(ODD_VALUES)
    return f"{where} = {str(owner[key])[:20]!r}", json.dumps(content).encode()


def random_entry(content: Any, rng: random.Random) -> tuple[str, Any, Any]:
    """A random place inside: its name, what holds it, and under which key."""
    owner, path = content, list[str]()
    while True:
        key = rng.choice(sorted(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
        path.append(str(key))
        if not (isinstance(owner[key], (dict, list)) and owner[key]) or rng.random() < 0.3:
            return ".".join(path), owner, key
        owner = owner[key]


def edit_json(path: Path, rng: random.Random) -> str:
    """Changes a JSON file of one object."""
    what, content = changed_json(json.loads(path.read_text(encoding="utf-8")), rng)
    put(path, content)
    return what


def edit_line(path: Path, rng: random.Random) -> str:
    """Changes one object of a file that has one a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    row = rng.randrange(len(lines))
    what, content = changed_json(json.loads(lines[row]), rng)
    put(path, "\n".join(lines[:row]).encode() + b"\n" + content + b"\n" + "\n".join(lines[row + 1 :]).encode())
    return f"line {row + 1}: {what}"
