"""Embeddings from elsewhere: read, evaluated, saved, and refused in a sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import rankgrad as rg
from rankgrad import cli
from rankgrad.runs.embedding_files import EmbeddingFile, evaluate_files

CLASSES = ["cat", "dog", "emu", "fox"]


@pytest.fixture
def made():
    rng = np.random.default_rng(0)
    labels = np.repeat(range(4), 5)
    return (rng.normal(size=(4, 8))[labels] + 0.8 * rng.normal(size=(20, 8))).astype(np.float32), labels


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluate(*arguments: object) -> dict:
    assert cli.main(["eval", *map(str, arguments), "--device", "cpu", "--out", "result"]) == 0
    return json.loads(Path("result/eval/test/result.json").read_text(encoding="utf-8"))


def write_labels(path, labels, *, header="label", names=None):
    rows = [header, *(names[label] if names else str(label) for label in labels)] if header else [str(x) for x in labels]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_npy_and_csv_give_the_metrics_of_evaluate(made, tmp_path, capsys):
    embeddings, labels = made
    np.save("x.npy", embeddings)
    write_labels(tmp_path / "y.csv", labels, names=CLASSES)
    found = evaluate("--embeddings", "x.npy", "--labels", "y.csv")
    wanted = rg.evaluate(embeddings, labels, ks=(1, 10))
    assert found["metrics"] == pytest.approx(dict(wanted))
    out = capsys.readouterr().out
    assert out.startswith("20 queries\n")
    assert "95% interval" in out
    assert all(metric in out for metric in ("R@1", "mAP", "MRR", "NDCG"))
    assert "rankgrad report result" in out
    # the names of the classes are in the table of the report
    assert "cat" in (tmp_path / "result" / "eval" / "test" / "table.csv").read_text()


def as_npy(embeddings, labels):
    np.save("x.npy", embeddings.astype(np.float64))
    np.save("y.npy", np.array(CLASSES)[labels])
    return ["--embeddings", "x.npy", "--labels", "y.npy"]


def as_safetensors(embeddings, labels):
    save_file({"embeddings": torch.from_numpy(embeddings), "labels": torch.from_numpy(labels)}, "x.safetensors")
    return ["--embeddings", "x.safetensors"]


def as_parquet(embeddings, labels):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"embedding": list(embeddings), "label": labels}), "x.parquet")
    return ["--embeddings", "x.parquet"]


def as_plain_lines(embeddings, labels):
    np.save("x.npy", embeddings)
    write_labels(Path("y.csv"), labels, header="")
    return ["--embeddings", "x.npy", "--labels", "y.csv"]


@pytest.mark.parametrize("write", [as_npy, as_safetensors, as_parquet, as_plain_lines])
def test_every_format_gives_the_same(made, write):
    assert evaluate(*write(*made))["metrics"] == pytest.approx(dict(rg.evaluate(*made, ks=(1, 10))))


def test_queries_against_a_gallery(made, tmp_path):
    embeddings, labels = made
    for name, rows in (("q", slice(0, None, 5)), ("g", slice(1, None))):
        np.save(f"{name}.npy", embeddings[rows])
        write_labels(tmp_path / f"{name}.csv", labels[rows], names=CLASSES)
    given = ["--embeddings", "q.npy", "--labels", "q.csv", "--gallery", "g.npy", "--gallery-labels", "g.csv"]
    found = evaluate(*given)
    wanted = rg.evaluate(embeddings[::5], labels[::5], embeddings[1:], labels[1:], ks=(1, 10))
    assert found["protocol"] == "query-gallery"
    assert found["metrics"] == pytest.approx(dict(wanted))


def test_the_files_of_a_run_give_its_result_again(made, tmp_path):
    embeddings, labels = made
    np.save("x.npy", embeddings)
    rows = ["path,label,category,is_query,is_gallery,class"]
    rows += [f"{i}.jpg,{label},,{int(i % 5 == 0)},{int(i % 5 > 0)},{CLASSES[label]}" for i, label in enumerate(labels)]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    found = evaluate("--embeddings", "x.npy", "--labels", "table.csv")
    query = np.arange(20) % 5 == 0
    wanted = rg.evaluate(embeddings[query], labels[query], embeddings[~query], labels[~query], ks=(1, 10))
    assert found["metrics"] == pytest.approx(dict(wanted))


def test_singletons_are_counted(made, tmp_path, capsys):
    embeddings, labels = made
    np.save("x.npy", embeddings[:16])
    write_labels(tmp_path / "y.csv", labels[:16], names=CLASSES)
    assert evaluate("--embeddings", "x.npy", "--labels", "y.csv")["skipped"] == 1
    assert "15 queries, 1 skipped (the only item of its class" in capsys.readouterr().out


def test_a_test_of_a_run_says_what_it_skipped(made):
    embeddings, labels = made
    few, all_of_them = (
        evaluate_files(EmbeddingFile(Path("x.npy"), embeddings[:n], {"label": [CLASSES[label] for label in labels[:n]]}))
        for n in (16, 20)
    )
    assert few.details == "test: 15 queries, 1 skipped (the only item of its class)"
    assert all_of_them.details == ""


def test_dot_products(made):
    embeddings, labels = made
    embeddings = embeddings * np.geomspace(0.01, 100, len(embeddings))[:, None].astype(np.float32)
    arguments = as_plain_lines(embeddings, labels)
    wanted = rg.evaluate(embeddings, labels, ks=(1, 10), normalize=False)
    assert evaluate(*arguments, "--no-normalize")["metrics"] == pytest.approx(dict(wanted))


def test_a_report_of_it(made, tmp_path, capsys):
    arguments = as_npy(*made)
    evaluate(*arguments)
    assert cli.main(["report", "result"]) == 0
    page = (tmp_path / "result" / "report.html").read_text(encoding="utf-8")
    assert "cat" in page
    assert "R@1" in page


def test_results_with_the_same_labels_are_compared(made, tmp_path, capsys):
    embeddings, labels = made
    write_labels(tmp_path / "y.csv", labels)
    for name, noise in (("a", 0.0), ("b", 2.0)):
        np.save(f"{name}.npy", embeddings + noise * np.random.default_rng(1).normal(size=embeddings.shape))
        assert cli.main(["eval", "--embeddings", f"{name}.npy", "--labels", "y.csv", "--device", "cpu"]) == 0
    assert cli.main(["report", "runs/eval-a", "runs/eval-b"]) == 0
    page = (tmp_path / "report-eval-a-eval-b.html").read_text(encoding="utf-8")
    assert "paired bootstrap interval" in page


@pytest.mark.parametrize(
    ("prepare", "arguments", "message"),
    [
        (None, ["--embeddings", "x.npy"], "--embeddings: x.npy does not exist"),
        (None, ["--embeddings", "x.txt"], "--embeddings must end in .npy, .safetensors, .parquet, got 'x.txt'"),
        ("npy", ["--embeddings", "x.npy"], "x.npy holds no labels: name a file of labels with --labels"),
        ("short", ["--embeddings", "x.npy", "--labels", "y.csv"], "y.csv has 19 labels and x.npy 20 embeddings"),
        ("columns", ["--embeddings", "x.npy", "--labels", "y.csv"], "wanted a column 'label', or one label a line"),
        ("damaged", ["--embeddings", "x.npy", "--labels", "y.csv"], "x.npy cannot be read: "),
        ("text", ["--embeddings", "x.safetensors"], "x.safetensors cannot be read: "),
        ("alone", ["--embeddings", "x.npy", "--labels", "y.csv"], "no query has a relevant candidate"),
    ],
)
def test_mistakes_are_a_sentence(made, prepare, arguments, message, tmp_path, capsys):
    embeddings, labels = made
    if prepare in ("npy", "short", "columns", "alone"):
        np.save("x.npy", embeddings)
    write_labels(tmp_path / "y.csv", {"short": labels[1:], "alone": range(20)}.get(prepare, labels))
    if prepare == "columns":
        (tmp_path / "y.csv").write_text("name,kind\n" + "a,b\n" * 20)
    if prepare == "damaged":
        Path("x.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'shape': (20, 8")
    if prepare == "text":
        Path("x.safetensors").write_bytes(b"hello")
    assert cli.main(["eval", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("rankgrad eval: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder of a run, or embeddings with --embeddings"),
        (["run", "--embeddings", "x.npy"], "name the folder of a run, or embeddings with --embeddings, and not both"),
        (["--embeddings", "x.npy", "--out", "."], ". already exists: choose another folder with --out"),
    ],
)
def test_wrong_flags_are_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["eval", *arguments])
    assert message in capsys.readouterr().err


def test_pictures_are_found_beside_the_labels_or_below_the_image_root(made, tmp_path):
    embeddings, labels = made
    np.save("x.npy", embeddings)
    (tmp_path / "lists").mkdir()
    rows = [f"{CLASSES[label]}/{i}.jpg,{CLASSES[label]}" for i, label in enumerate(labels.tolist())]
    (tmp_path / "lists" / "y.csv").write_text("\n".join(["path,label", *rows]))
    arguments = ("--embeddings", "x.npy", "--labels", "lists/y.csv")
    assert evaluate(*arguments)["root"] == str(tmp_path / "lists")
    assert cli.main(["eval", *arguments, "--image-root", "photos", "--device", "cpu", "--out", "other"]) == 0
    assert json.loads(Path("other/eval/test/result.json").read_text())["root"] == str(tmp_path / "photos")
