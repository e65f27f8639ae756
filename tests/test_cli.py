"""The command line: commands, versions, help when something is wrong, and the demo in miniature."""

import importlib
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE

import fake_datasets
import numpy as np
import pytest
import torch
from report.run_folders import make_data, write_run
from torch import nn

import rankgrad
from rankgrad import cli
from rankgrad.cli import demo, train_commands
from rankgrad.cli.parser import device_named
from rankgrad.data.table import Table


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rankgrad {version('rankgrad')}\n"
    assert version("rankgrad") == rankgrad.__version__


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and command.help in out for name, command in cli.COMMANDS.items())


@pytest.mark.parametrize("command", cli.COMMANDS.values(), ids=cli.COMMANDS)
def test_every_command_is_a_function_of_a_module(command):
    assert callable(getattr(importlib.import_module(f"rankgrad.cli.{command.module}"), command.function))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "unknown command 'dmeo': did you mean 'demo'?"),
        (["xyz"], "unknown command 'xyz': choose one of demo, train, eval, recipes"),
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--classes", "1"], "--classes must be at least 2, got 1"),
    ],
)
def test_wrong_arguments_get_a_hint_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_the_rest_of_the_line_and_the_status_pass_through(monkeypatch):
    received = []
    monkeypatch.setattr(demo, "main", lambda arguments: received.extend(arguments) or 7)
    assert cli.main(["demo", "--help", "x"]) == 7
    assert received == ["--help", "x"]


@pytest.mark.parametrize(("module", "extra"), cli.EXTRA_OF.items())
def test_a_missing_extra_is_named(module, extra, monkeypatch, capsys):
    def command(arguments):
        raise ModuleNotFoundError(f"No module named '{module}.inner'", name=f"{module}.inner")

    monkeypatch.setattr(demo, "main", command)
    assert cli.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"rankgrad demo: this needs {module}.inner. Install it with pip install")
    assert f"pip install -e '.[{extra}]'" in error
    assert f"pip install 'rankgrad[{extra}]'" in error


def test_a_missing_package_with_a_message_of_its_own(monkeypatch, capsys):
    def command(arguments):
        raise ModuleNotFoundError("--wandb pets needs the package wandb: pip install wandb", name="wandb")

    monkeypatch.setattr(demo, "main", command)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "rankgrad demo: --wandb pets needs the package wandb: pip install wandb\n"


# argparse ignores that nobody reads its help
@pytest.mark.parametrize(("arguments", "status"), [(["recipes"], 141), (["--help"], 0)])
def test_a_closed_pipe_ends_the_command_quietly(arguments, status):
    # a reader that leaves before anything is written, as `| head` does after its lines
    code = f"import sys; sys.stdin.read(); from rankgrad.cli import main; sys.exit(main({arguments!r}))"
    command = subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=PIPE)
    command.stdout.close()
    command.stdin.close()
    assert command.stderr.read() == b""
    command.stderr.close()
    assert command.wait() == status


def test_training_ends_with_the_next_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = fake_datasets.build("folder", tmp_path / "my images", classes=6, per_class=4)
    common = ["--device", "cpu"]
    train = ["train", "--data", str(data), "--debug", "--cache", "none", "--no-tensorboard", "--out", "my run"]
    assert cli.main([*train, *common]) == 0
    lines = capsys.readouterr().out.partition("next:\n")[2].splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  rankgrad ")]
    assert [command[1] for command in commands] == ["report", "embed", "serve", "card"]
    # they work as they stand; the page is served until it is stopped
    report, embed, serve, card = commands
    assert cli.main(report[1:]) == 0
    assert cli.main([*embed[1:], *common]) == 0
    assert (Path(serve[-1]) / "embeddings.npy").is_file()
    assert cli.main([*card[1:], "--no-onnx"]) == 0
    assert (Path(card[-1]) / "README.md").is_file()


def test_a_report_goes_into_its_run_and_replaces_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("mine")
    for name in ("a", "b"):
        write_run(tmp_path / name, make_data(tmp_path / "images"))
    assert cli.main(["report", "a"]) == 0
    assert capsys.readouterr().out.startswith("a/report.html (")
    assert cli.main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out.startswith("report-a-b.html (")
    assert (tmp_path / "report.html").read_text() == "mine"


def test_a_study_prints_each_note_once(tmp_path, capsys):
    data = fake_datasets.build("omniglot", tmp_path / "data", classes=6, per_class=4)
    given = ["--data", str(data), "--debug", "--only", "20 bins", "--seeds", "2", "--out", str(tmp_path / "study")]
    assert cli.main(["study", "omniglot", *given, "--device", "cpu", "--cache", "none"]) == 0
    out = capsys.readouterr().out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert notes, "the copy is incomplete"
    assert len(notes) == len(set(notes))
    assert "seed 1" in out


def test_a_plan_takes_the_default_recipe(tmp_path, capsys):
    data = fake_datasets.build("folder", tmp_path, classes=6, per_class=4)
    arguments = ["--debug", "--device", "cpu", "--cache", "none"]
    assert cli.main(["plan", "--data", str(data), *arguments]) == 0
    assert capsys.readouterr().out.startswith("own-images-debug: ")


def test_a_bug_is_not_mistaken_for_a_missing_extra(monkeypatch):
    def command(arguments):
        raise ModuleNotFoundError("No module named 'rankgrad.typo'", name="rankgrad.typo")

    monkeypatch.setattr(demo, "main", command)
    with pytest.raises(ModuleNotFoundError, match="typo"):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "sop-recal-at-k"], "rankgrad train: there is no recipe 'sop-recal-at-k': did you mean 'sop-recall-at-k'?"),
        (["train", "sop-recall-at-k"], "rankgrad train: the data set 'sop' needs --data DIR"),
        (["train", "--data", "/no/such/place"], "rankgrad train: folder: /no/such/place does not exist"),
        (["train", "sop-recall-at-k", "--lr", "0"], "rankgrad train: --lr must be at least 1e-12, got 0.0"),
        (
            ["train", "sop-recall-at-k", "--batch-size", "10"],
            "--batch-size must be a multiple of --per-class (4), got 10; use 8 or 12",
        ),
        (["train", "--resume", "/no/such/run"], "/no/such/run is not the folder of a run"),
        (["train", "--device", "tpu9"], "rankgrad train: --device must be cpu, cuda or cuda:N, got 'tpu9'"),
        (["train", "--workers", "0"], "rankgrad train: --workers must be at least 1, got 0"),
        (["eval", "/no/such/run"], "rankgrad eval: /no/such/run/recipe.json is missing"),
        (["recipes", "qqqq"], "rankgrad recipes: no recipe contains 'qqqq'"),
        (["check-data", "sop", "/no/such/place"], "rankgrad check-data: sop: /no/such/place does not exist"),
        (
            ["sweep", "glyphs-fastap", "--grid", "binz=1"],
            "rankgrad sweep: --grid: there is no setting 'binz': did you mean 'bins'?",
        ),
        (["plan"], "rankgrad plan: own-images: the batch size depends on the data: give --data DIR or --batch-size N"),
        (["study", "omniglot", "--seeds", "x"], "rankgrad study: --seeds must be a number of seeds"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    with pytest.raises((ValueError, OSError)):
        cli.main([*arguments, "--traceback"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--batchsize", "8"], "rankgrad train: unknown flag --batchsize: did you mean --batch-size?"),
        (["train", "sop-recall-at-k", "more"], "rankgrad train: unrecognized arguments: more"),
        (["eval", "run", "--checkpoint", "first"], "rankgrad eval: --checkpoint must be best, last or untrained, got 'first'"),
        (["sweep", "glyphs-fastap"], "rankgrad sweep: the following arguments are required: --grid"),
        (["study", "omniglt"], "rankgrad study: there is no study 'omniglt': did you mean 'omniglot'?"),
        (["check-data", "sopp", "."], "rankgrad check-data: there is no data set 'sopp': did you mean 'sop'?"),
        (["protocols", "--all"], "rankgrad protocols: unknown flag --all"),
    ],
)
def test_a_wrong_command_line_is_answered_with_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_a_run_that_cannot_go_on_is_a_sentence_and_a_bug_is_not(monkeypatch, capsys):
    from rankgrad.train.errors import TrainingError

    def command(error):
        def run(arguments):
            raise error

        return run

    monkeypatch.setattr(train_commands, "train", command(TrainingError("the disk is full")))
    monkeypatch.setattr(train_commands, "evaluate", command(RuntimeError("a bug")))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "rankgrad train: the disk is full\n"
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["eval"])


def test_escapes_in_names_do_not_reach_the_terminal(monkeypatch, capsys):
    def command(arguments):
        raise ValueError("cannot read:\n  \x1b[31mevil\x1b]0;title\x07.jpg")

    monkeypatch.setattr(demo, "main", command)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "rankgrad demo: cannot read:\n  \\x1b[31mevil\\x1b]0;title\\x07.jpg\n"


def test_recipes_and_protocols_are_listed(capsys):
    assert cli.main(["recipes"]) == 0
    assert re.search(r"^sop-recall-at-k +R@1 82\.8 +RS@k, ResNet-50, batch 4,000", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["recipes", "sop-recall-at-k"]) == 0
    assert re.search(r"^  batch_size +4000 ", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["protocols"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("all-vs-all", "query-gallery", "vehicleid-official", "roxford"))


def test_the_help_of_a_recipe_shows_its_own_settings(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "cars-recall-at-k", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--batch-size BATCH_SIZE [^\[]*\[392\]", text)
    assert re.search(r"--milestones MILESTONES [^\[]*\[80,140\]", text)


def test_demo_in_miniature(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANKGRAD_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
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
    assert "RecallAtKLoss: 4 steps" in captured.out
    assert "report: runs/demo-2/report.html" in captured.out
    assert "RamboRecallLoss" in (tmp_path / "runs" / "demo-2" / "report.html").read_text(encoding="utf-8")


def fake_glyphs(images: np.ndarray, labels: list[int]) -> Table:
    return Table("glyphs/test", Path(), tuple(map(str, range(len(labels)))), np.array(labels), pixels=images)


def test_demo_evaluation_equals_the_definition(monkeypatch):
    monkeypatch.setattr(demo, "CHUNK", 7)
    rng = np.random.default_rng(0)
    data = fake_glyphs(rng.integers(0, 255, (40, 4, 4), dtype=np.uint8), rng.permutation(np.repeat(range(10), 4)).tolist())
    embeddings = torch.nn.functional.normalize(demo.as_input(data, slice(None)).flatten(1)).double()
    first, tenth, precision = [], [], []
    for q in range(40):
        order = [i for i in (-embeddings @ embeddings[q]).argsort().tolist() if i != q]
        hits = [data.labels[i] == data.labels[q] for i in order]
        first.append(hits[0])
        tenth.append(any(hits[:10]))
        precision.append(np.mean([np.mean(hits[: k + 1]) for k, hit in enumerate(hits) if hit]))
    result = demo.evaluate(nn.Flatten(), data).metrics
    assert [result[metric] for metric in demo.METRICS] == pytest.approx(
        [np.mean(values) for values in (first, tenth, precision)]
    )


def test_demo_evaluation_gives_nothing_for_ties_or_nan():
    data = fake_glyphs(np.full((40, 4, 4), 9, np.uint8), np.repeat(range(10), 4).tolist())
    assert demo.evaluate(nn.Flatten(), data).metrics["R@10"] == 0
    with pytest.raises(ValueError, match="must be finite"):
        demo.evaluate(nn.Sequential(nn.Flatten(), nn.Threshold(1, float("nan"))), data)


def test_demo_batches_are_balanced_and_repeat_from_any_step():
    rng = np.random.default_rng(0)
    data = fake_glyphs(rng.integers(0, 255, (48, 8, 8), dtype=np.uint8), np.repeat(range(6), 8).tolist())
    batches = demo.GlyphBatches(data, seed=3)
    batches.set_epoch(2)
    whole = list(batches.iterate(0))
    assert [step for step, *_ in whole] == list(range(len(batches)))
    for (step, indices, images, labels), (_, other_indices, other_images, _) in zip(whole[1:], batches.iterate(1), strict=True):
        assert step >= 1
        assert labels.bincount().tolist() == [demo.PER_CLASS] * 6
        assert torch.equal(indices, other_indices)
        assert torch.equal(images, other_images)


def test_kernels_run_on_the_gpu_of_the_command_line(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_named("cuda:1") == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert device_named("cuda") == device_named("auto") == torch.device("cuda")  # of torchrun: the one of its rank
    assert len(chosen) == 1
    with pytest.raises(ValueError, match="--device cuda:2: the last GPU here is cuda:1"):
        device_named("cuda:2")
