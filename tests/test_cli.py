"""The command line: verbs, versions, help when something is wrong, and the demo in miniature."""

import re
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch import nn

import rankgrad
from rankgrad import cli, demo
from rankgrad.data.glyphs import Glyphs


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rankgrad {version('rankgrad')}\n"
    assert version("rankgrad") == rankgrad.__version__


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_verb(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and verb.__doc__ in out for name, verb in cli.VERBS.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "unknown verb 'dmeo': did you mean 'demo'?"),
        (["xyz"], "unknown verb 'xyz': choose one of demo, bench"),
        (["bench", "loses"], "unknown verb 'loses': did you mean 'losses'?"),
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--classes", "1"], "--classes must be at least 2, got 1"),
    ],
)
def test_wrong_arguments_get_a_hint_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_the_rest_of_the_line_and_the_status_pass_through(monkeypatch):
    from rankgrad.bench import losses

    received = []
    monkeypatch.setattr(losses, "main", lambda arguments: received.extend(arguments) or 7)
    assert cli.main(["bench", "losses", "--help", "x"]) == 7
    assert received == ["--help", "x"]


@pytest.mark.parametrize(("module", "extra"), cli.EXTRA_OF.items())
def test_a_missing_extra_is_named(module, extra, monkeypatch, capsys):
    def verb(arguments):
        raise ModuleNotFoundError(f"No module named '{module}.inner'", name=f"{module}.inner")

    monkeypatch.setattr(cli, "VERBS", {"demo": verb})
    assert cli.main(["demo"]) == 1
    assert f"pip install 'rankgrad[{extra}]'" in capsys.readouterr().err


def test_a_bug_is_not_mistaken_for_a_missing_extra(monkeypatch):
    def verb(arguments):
        raise ModuleNotFoundError("No module named 'rankgrad.typo'", name="rankgrad.typo")

    monkeypatch.setattr(cli, "VERBS", {"demo": verb})
    with pytest.raises(ModuleNotFoundError, match="typo"):
        cli.main(["demo"])


def test_demo_in_miniature(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANKGRAD_CACHE", str(tmp_path))
    assert cli.main(["demo", "--steps", "4", "--classes", "30"]) == 0
    captured = capsys.readouterr()
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+)", captured.out, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == [
        "untrained",
        "RecallAtKLoss",
        "SmoothAPLoss",
        "FastAPLoss",
        "RamboRecallLoss",
    ]
    # four steps on thirty classes already teach something, and each loss something else
    before, *after = [tuple(map(float, numbers)) for _, *numbers in rows]
    assert all(quality[2] > before[2] for quality in after)
    assert len(set(after)) == len(after)
    assert "RecallAtKLoss    step    4/4" in captured.err


def fake_glyphs(images: np.ndarray, labels: list[int]) -> Glyphs:
    names = tuple(str(label) for label in range(max(labels) + 1))
    return Glyphs(images, np.array(labels), np.zeros(len(labels), np.int64), names, ("all",))


def test_demo_evaluation_equals_the_definition(monkeypatch):
    monkeypatch.setattr(demo, "CHUNK", 7)
    rng = np.random.default_rng(0)
    data = fake_glyphs(rng.integers(0, 255, (40, 4, 4), dtype=np.uint8), rng.permutation(np.repeat(range(10), 4)).tolist())
    embeddings = torch.nn.functional.normalize(demo.as_input(data.images).flatten(1)).double()
    first, tenth, precision = [], [], []
    for q in range(40):
        order = [i for i in (-embeddings @ embeddings[q]).argsort().tolist() if i != q]
        hits = [data.labels[i] == data.labels[q] for i in order]
        first.append(hits[0])
        tenth.append(any(hits[:10]))
        precision.append(np.mean([np.mean(hits[: k + 1]) for k, hit in enumerate(hits) if hit]))
    wanted = [100 * np.mean(values) for values in (first, tenth, precision)]
    quality = demo.evaluate(nn.Flatten(), data)
    assert (quality.recall_at_1, quality.recall_at_10, quality.mean_average_precision) == pytest.approx(wanted)


def test_demo_evaluation_gives_nothing_for_ties_or_nan():
    data = fake_glyphs(np.full((40, 4, 4), 9, np.uint8), np.repeat(range(10), 4).tolist())
    assert demo.evaluate(nn.Flatten(), data).recall_at_10 == 0
    with pytest.raises(FloatingPointError, match="diverged"):
        demo.evaluate(nn.Sequential(nn.Flatten(), nn.Threshold(1, float("nan"))), data)
