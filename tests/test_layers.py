"""The architecture as a test: which room may import which, and what `import rankgrad` costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rankgrad"

# `rankgrad` is the package's own __init__, the public names; every package may use the modules of ROOT
ROOT = {"_checks", "_device", "_files", "_messages"}
MAY_IMPORT = {
    **{module: set() for module in ROOT},
    "ops": set(),
    "losses": {"ops"},
    "data": set(),
    "models": set(),
    "eval": {"ops"},
    "train": {"data"},
    "integrations": {"train"},
    "runs": {"losses", "data", "models", "eval", "train", "integrations"},
    "detection": {"losses", "ops", "data", "models", "train", "runs", "report"},
    "recipes": {"runs", "detection"},
    "search": {"data", "models", "eval", "runs", "recipes"},
    "report": {"rankgrad", "data", "eval"},
    "cli": {"rankgrad", "data", "eval", "detection", "models", "recipes", "report", "runs", "search", "train"},
    "rankgrad": {"losses", "ops", "eval", "train"},
}


def room_of(path: Path, package: Path) -> str:
    """The folder or module of `path` directly under the package."""
    name = path.relative_to(package).parts[0].removesuffix(".py")
    return "rankgrad" if name == "__init__" else name


def imported_rooms(path: Path, rooms: set[str]) -> Iterator[tuple[int, str]]:
    """Line and room of every import of ours anywhere in the file, in functions too; a relative import is room '.'."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "."
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            top, _, rest = target.partition(".")
            first = rest.partition(".")[0]
            if top == "rankgrad":
                # `from rankgrad import ops` names a room, `from rankgrad import FastAPLoss` a public name
                yield node.lineno, first if first in rooms else "rankgrad"


def violations(package: Path) -> list[str]:
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        if room not in MAY_IMPORT:
            wrong.append(f"{path.relative_to(package)} is in no known room: add it to MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[room] | {room} | ROOT
        wrong += [
            f"{path.relative_to(package)}:{line} " + ("is a relative import" if target == "." else f"imports {target}")
            for line, target in imported_rooms(path, set(MAY_IMPORT))
            if target not in allowed
        ]
    return wrong


@pytest.mark.xfail(reason="the packages are being re-cut", strict=False)
def test_rooms_import_only_what_they_may():
    assert not violations(PACKAGE), "\n".join(violations(PACKAGE))


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("ops/ranks.py", "from rankgrad.losses.presets import FastAPLoss", "ops/ranks.py:1 imports losses"),
        ("ops/ranks.py", "import rankgrad.losses", "ops/ranks.py:1 imports losses"),
        ("eval/ranks.py", "from rankgrad import losses", "eval/ranks.py:1 imports losses"),
        ("losses/simix.py", "from rankgrad import FastAPLoss", "losses/simix.py:1 imports rankgrad"),
        ("losses/simix.py", "import rankgrad as rg", "losses/simix.py:1 imports rankgrad"),
        ("data/glyphs.py", "def draw():\n    import rankgrad.ops.ranks", "data/glyphs.py:2 imports ops"),
        ("train/loop.py", "from .multistage import step", "train/loop.py:1 is a relative import"),
        ("train/loop.py", "from . import multistage", "train/loop.py:1 is a relative import"),
        ("utils/misc.py", "", "utils/misc.py is in no known room: add it to MAY_IMPORT"),
        ("__init__.py", "from rankgrad.data.glyphs import load_glyphs", "__init__.py:1 imports data"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, text, complaint):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert violations(tmp_path) == [complaint]


def test_allowed_imports_pass(tmp_path):
    for path, text in {
        "ops/ranks.py": "import torch\nfrom rankgrad._checks import check_scores\nfrom rankgrad.ops.relevance import Lists",
        "losses/presets.py": "from rankgrad.ops.ranks import Ranks\nimport rankgradient",
        "cli/demo.py": "import rankgrad as rg\nfrom rankgrad.data.glyphs import load_glyphs",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert violations(tmp_path) == []


def loaded_by(statement: str) -> set[str]:
    """Names in sys.modules after `statement` in a fresh interpreter, less those that torch and numpy bring."""
    code = f"import sys, torch, numpy; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_rankgrad_loads_torch_and_numpy_only():
    modules = loaded_by("import rankgrad")
    assert "rankgrad" in modules
    others = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"rankgrad", "torch", "numpy"}
    assert not others, f"`import rankgrad` also loads {sorted(others)}: import them where they are used"
    kernels = {name for name in modules if name.startswith(("rankgrad.ops.triton", "rankgrad.ops.fused"))}
    assert not kernels, f"`import rankgrad` loads the kernels {sorted(kernels)}: import them when one is wanted"


def test_a_heavy_import_would_be_seen():
    assert "PIL" in loaded_by("import PIL.Image")
