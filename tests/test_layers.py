"""The architecture as a test: which package may import which, one name for one thing, and what `import rankgrad` costs."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rankgrad"

# `rankgrad` is the package's own __init__, the public names; every package may use the modules of ROOT
ROOT = {"_checks", "_citations", "_deprecation", "_device", "_dry_run", "_files", "_gpu", "_kernel", "_messages"}
MAY_IMPORT = {
    **{module: set() for module in ROOT},
    "ops": set(),
    "losses": {"ops"},
    "data": set(),
    "models": set(),
    "eval": {"ops"},
    "train": {"data"},
    "integrations": {"rankgrad", "losses", "data", "models", "search", "train"},
    "runs": {"losses", "data", "models", "eval", "train", "integrations"},
    "detection": {"losses", "ops", "data", "models", "train", "runs", "report"},
    "recipes": {"runs", "detection"},
    "search": {"data", "models", "eval", "runs", "train"},
    "report": {"rankgrad", "data", "eval"},
    "cli": {"rankgrad", "data", "eval", "detection", "models", "recipes", "report", "runs", "search", "train"},
    # `search` inside load(), so that `import rankgrad` stays light
    "rankgrad": {"losses", "ops", "eval", "train", "search"},
}


# the same thing at two layers, where the package says which: these names of modules and classes may stand in several packages
SAME_THING: dict[str, set[str]] = {
    # as sentence-transformers calls them
    "ClassBalanced": {"data", "integrations"},
    "RankLoss": {"losses", "integrations"},
}


def layer_of(path: Path, package: Path) -> str:
    """The folder or module of `path` directly under the package."""
    name = path.relative_to(package).parts[0].removesuffix(".py")
    return "rankgrad" if name == "__init__" else name


def imported_layers(path: Path, layers: set[str]) -> Iterator[tuple[int, str]]:
    """Line and layer of every import of ours anywhere in the file, in functions too; a relative import is layer '.'."""
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
                # `from rankgrad import ops` names a layer, `from rankgrad import FastAPLoss` a public name
                yield node.lineno, first if first in layers else "rankgrad"


def violations(package: Path) -> list[str]:
    wrong = []
    for path in sorted(package.rglob("*.py")):
        layer = layer_of(path, package)
        if layer not in MAY_IMPORT:
            wrong.append(f"{path.relative_to(package)} is in no known layer: add it to MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[layer] | {layer} | ROOT
        wrong += [
            f"{path.relative_to(package)}:{line} " + ("is a relative import" if target == "." else f"imports {target}")
            for line, target in imported_layers(path, set(MAY_IMPORT))
            if target not in allowed
        ]
    return wrong


def unused_permissions(package: Path) -> list[str]:
    used = {
        (layer_of(path, package), target)
        for path in package.rglob("*.py")
        for _, target in imported_layers(path, set(MAY_IMPORT))
    }
    return [
        f"{layer} -> {target}"
        for layer, targets in MAY_IMPORT.items()
        for target in sorted(targets - {t for a, t in used if a == layer})
    ]


def modules_of_one_name(package: Path) -> list[str]:
    found = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            found[path.stem].append(path.relative_to(package))
    return _repeated(found)


def classes_of_one_name(package: Path) -> list[str]:
    found = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path.relative_to(package))
    return _repeated(found)


def _repeated(found: dict[str, list[Path]]) -> list[str]:
    return [
        f"{name}: {', '.join(map(str, paths))}"
        for name, paths in found.items()
        if len(paths) > 1 and {path.parts[0] for path in paths} != SAME_THING.get(name)
    ]


@pytest.mark.parametrize("check", [violations, unused_permissions, modules_of_one_name, classes_of_one_name])
def test_the_layers_and_names(check):
    assert not check(PACKAGE), "\n".join(check(PACKAGE))


def test_an_unused_permission_is_found(tmp_path):
    for layer, targets in MAY_IMPORT.items():
        file = tmp_path / ("__init__.py" if layer == "rankgrad" else f"{layer}/a.py" if layer not in ROOT else f"{layer}.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            "".join("import rankgrad\n" if each == "rankgrad" else f"from rankgrad import {each}\n" for each in targets)
        )
    assert unused_permissions(tmp_path) == []
    (tmp_path / "train" / "a.py").write_text("")
    assert unused_permissions(tmp_path) == ["train -> data"]


def test_two_modules_or_classes_of_one_name_are_found(tmp_path):
    for path, text in {
        "ops/ranks.py": "class Plan:\n    class Inner: ...",
        "eval/ranks.py": "class _Plan: ...\nclass Inner: ...",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert modules_of_one_name(tmp_path) == ["ranks: eval/ranks.py, ops/ranks.py"]
    assert classes_of_one_name(tmp_path) == ["Plan: eval/ranks.py, ops/ranks.py"]


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
        ("utils/misc.py", "", "utils/misc.py is in no known layer: add it to MAY_IMPORT"),
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
        "losses/presets.py": "from rankgrad.ops.autograd import Ranks\nimport rankgradient",
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


def test_a_first_loss_and_its_gradient_load_nothing_else():
    call = "import rankgrad; x = torch.eye(8).requires_grad_(); rankgrad.SmoothAPLoss()(x, torch.arange(8) // 2).backward()"
    others = {name.partition(".")[0] for name in loaded_by(call)} - sys.stdlib_module_names - {"rankgrad", "torch", "numpy"}
    assert not others, f"the first call of a loss also loads {sorted(others)}, which takes longer than the loss"


def test_a_heavy_import_would_be_seen():
    assert "PIL" in loaded_by("import PIL.Image")
