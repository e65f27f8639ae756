"""The kernel benchmark without a GPU: its rows, its verdicts, its file, its picture, and the formulations beside ours."""

import csv
import struct
from dataclasses import replace
from itertools import product

import pytest
import torch
from benchmarks import kernel_cases, kernel_runner, kernels, performance, plot
from benchmarks.baselines import chunked, dense, dense_baseline
from benchmarks.kernel_cases import Case, Shape, Sizes, Target
from benchmarks.synthetic import hard_batch, ragged_batch

import rankgrad

CPU = torch.device("cpu")
LOSSES = ("recall_at_k", "smooth_ap", "fast_ap", "rambo_recall", "rambo_ap")


def value_and_gradient(function, per_class, dtype=torch.float64):
    embeddings, labels = hard_batch(36, 16, per_class, dtype=dtype)
    embeddings.requires_grad_()
    value = function(embeddings, labels, per_class)
    return value, torch.autograd.grad(value, embeddings)[0]


@pytest.mark.parametrize("per_class", [2, 3, 18], ids=["one relevant", "two", "more than are unrolled"])
@pytest.mark.parametrize("loss", LOSSES)
def test_row_chunks_equal_all_scores_at_once(loss, per_class, monkeypatch):
    monkeypatch.setattr(chunked, "TILE_SCORES", 36 * 10)
    monkeypatch.setattr(chunked, "TILE_ROWS", 1)
    monkeypatch.setattr(chunked, "PAIR_NUMBERS", 16 * per_class * 7)
    in_chunks = chunked.chunked_formulation(loss, compiling=False, dtype=torch.float64)
    value, gradient = value_and_gradient(in_chunks, per_class)
    true_value, true_gradient = value_and_gradient(dense_baseline(loss).function, per_class)
    torch.testing.assert_close(value, true_value, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, true_gradient, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-4


def test_float16_inputs_keep_float32_results():
    value, gradient = value_and_gradient(chunked.chunked_formulation("recall_at_k", compiling=False), 3, torch.float32)
    true_value, true_gradient = value_and_gradient(dense.dense_recall_at_k, 3)
    assert value.dtype == gradient.dtype == torch.float32
    assert abs(value - true_value) < 1e-3
    assert 1e-5 < (gradient - true_gradient).norm() / true_gradient.norm() < 2e-2


@pytest.mark.parametrize("share", ["1%", "10%", "90%"])
def test_formulations_of_a_single_list_agree(share):
    batch = kernel_cases.make_batch(Shape(3000, share, 1, "vector"), CPU, CPU)
    value, gradient = kernel_runner.vector_call("ours", batch)()
    for what in ("two-sorts", "six-argsorts"):
        other_value, other_gradient = kernel_runner.vector_call(what, batch)()
        torch.testing.assert_close(value, other_value)
        torch.testing.assert_close(gradient, other_gradient)
    assert gradient.count_nonzero() > 10


def test_the_products_alone_are_the_products():
    queries, candidates = torch.randn(7, 3), torch.randn(5, 3)
    d_queries, _ = chunked.products_only(queries, candidates, 3)
    torch.testing.assert_close(d_queries, queries @ candidates.T @ candidates)


def test_ragged_classes_are_shuffled_and_complete():
    embeddings, labels = ragged_batch(1000, 4, 50)
    sizes = labels.bincount()
    assert embeddings.shape == (1000, 4)
    assert sizes.sum() == 1000
    assert sizes.min() >= 1
    assert 25 < sizes.max() <= 50
    assert not torch.equal(labels, labels.sort().values)
    assert len(ragged_batch(10, 4, 50)[1]) == 10
    with pytest.raises(ValueError, match="at least 1"):
        ragged_batch(10, 4, 0)


def test_a_query_of_the_gallery_finds_all_its_relatives():
    batch = kernel_cases.make_batch(Shape(8, "4", 6, "gallery", 32), CPU, CPU)
    queries, labels, gallery, gallery_labels = batch.arguments
    assert (len(queries), len(gallery)) == (8, 32)
    assert ((labels[:, None] == gallery_labels).sum(1) == 4).all()
    assert not torch.equal(gallery_labels, gallery_labels.sort().values)
    assert batch.gradient_bytes == 40 * 6 * 4


def test_every_target_has_a_row():
    rows = set(kernel_cases.all_cases(Sizes(), huge=True))
    with_target = [(case.loss, case.shape.queries, case.shape.relevant, case.precision) for case in rows if case.target]
    of_losses = dict.fromkeys(kernel_cases.COUNTED, kernel_cases.TARGETS) | {"fast_ap": kernel_cases.FAST_AP_TARGETS}
    wanted = [
        (loss, *size, precision)
        for loss, targets in of_losses.items()
        for precision, sizes in targets.items()
        for size in sizes
    ]
    wanted += [(*row, "0-499", precision) for row in kernel_cases.RAGGED_TARGETS for precision in kernel_cases.PRECISIONS]
    assert sorted(with_target) == sorted(wanted)
    dims = {case.shape.dim for case in rows if case.row == "recall_at_k/ours" and case.shape.queries == 16384}
    assert dims == {64, 128, 384, 512, 768, 2048}
    assert set(kernel_cases.quick_cases(Sizes())) <= rows


def test_verdicts_name_what_is_exceeded():
    target = Target(2, 100)
    assert target.verdict(2, 100) == "met"
    assert target.verdict(3, 90) == "missed: time 1.50x"
    assert target.verdict(3, 200) == "missed: time 1.50x, memory 2.00x"
    at_the_end = kernel_cases.vector_target(Shape(10**8, "1%", 1, "vector"), 40, 400)
    assert at_the_end == Target(10, 100)
    assert kernel_cases.vector_target(Shape(10**8, "10%", 1, "vector"), 45, 400) == Target(20, 100)
    assert kernel_cases.vector_target(Shape(10**7, "10%", 1, "vector"), 40, 400) == Target(40, 100)


def test_slow_calls_are_repeated_as_seldom_as_possible(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel_runner, "peak_memory", lambda call, device: call() or 7)
    monkeypatch.setattr(kernel_runner, "timed", lambda call, device: call() or 3.0)
    found = kernel_runner.measured(lambda: calls.append(0), CPU, 0.4)
    assert (len(calls), found.timing.median, found.timing.repetitions, found.memory) == (2, 3.0, 1, 7)
    monkeypatch.setattr(kernel_runner, "timed", lambda call, device: call() or 0.01)
    assert kernel_runner.measured(lambda: calls.append(0), CPU, 0.4).timing.repetitions == 40


@pytest.fixture
def no_interpreter(monkeypatch):
    """The command on the CPU with plain torch in the place of the kernels, which the interpreter runs too slowly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine the threads of a tiny product wait for each other
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernel_runner, "BACKEND", "tiled")
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    monkeypatch.setattr(kernel_runner, "_triton_version", lambda: "3.6.0")
    yield
    torch.set_num_threads(threads)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


COLUMNS = "gpu,driver,torch,triton,rankgrad,commit,date,row,N,relevant,d,precision,ms,ms20,ms80,MB,target,note"


@pytest.mark.usefixtures("no_interpreter")
def test_the_command_prints_and_records_every_row(tmp_path, capsys):
    path = tmp_path / "results" / "rows.csv"
    assert kernels.main(["--cpu-check", "--huge", "--csv", str(path), "--commit", "abc"]) == 0
    rows = rows_of(path)
    assert list(rows[0]) == COLUMNS.split(",")
    wanted = dict.fromkeys(kernel_cases.all_cases(kernel_cases.TINY, huge=True))
    shapes = [(case.row, case.shape.text, case.shape.relevant, str(case.shape.dim), case.precision) for case in wanted]
    assert [(row["row"], row["N"], row["relevant"], row["d"], row["precision"]) for row in rows] == shapes
    for row in rows:
        assert 0 < float(row["ms20"]) <= float(row["ms"]) <= float(row["ms80"])
        assert (row["MB"] == "") == (row["row"].startswith("products"))
        assert (row["torch"], row["triton"]) == (torch.__version__, "3.6.0")
        assert row["commit"]
        assert row["gpu"]
    on_a_list = [row for row in rows if row["row"] == "rambo_ap/ours/vector"]
    assert all(row["target"] and row["note"].startswith(("met", "missed: ")) for row in on_a_list)
    errors = rows_of(path.with_name("rows-errors.csv"))
    assert sorted((row["loss"], row["precision"]) for row in errors) == sorted(product(LOSSES, ("fast", "high")))
    assert all(float(row["value"]) < 1e-2 and float(row["plain_gradient"]) >= 0 and row["commit"] for row in errors)
    assert len(performance.errors(errors).splitlines()) == 2 + len(LOSSES)
    printed = capsys.readouterr().out
    assert "rambo_recall  high" in printed
    assert "targets met" in printed
    assert all(f"\n{row['row']} " in printed for row in rows)


@pytest.mark.usefixtures("no_interpreter")
def test_a_second_run_adds_to_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    for pattern in ("recall_at_k/ours N=32 .* d=16 fast", "products/floor N=40"):
        assert kernels.main(["--cpu-check", "--only", pattern, "--csv", str(path)]) == 0
    assert [row["row"] for row in rows_of(path)] == ["recall_at_k/ours", "products/floor"]


@pytest.mark.usefixtures("no_interpreter")
def test_a_broken_row_is_noted_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    def breaks(self, scores, relevance):
        raise RuntimeError("out of shared memory\nlong story")

    def runs_out(embeddings, labels, per_class):
        raise torch.OutOfMemoryError

    def does_not_compile(*arguments):
        raise dense.UnavailableError("torch.compile: no compiler\nlong story")

    path = tmp_path / "rows.csv"
    arguments = ["--cpu-check", "--csv", str(path), "--only"]
    monkeypatch.setattr(kernel_runner, "dense_baseline", lambda loss: replace(dense_baseline(loss), function=runs_out))
    monkeypatch.setattr(kernel_runner, "chunked_formulation", lambda loss, *, compiling: does_not_compile)
    assert kernels.main([*arguments, "^smooth_ap/(dense|chunked)", "--memory-limit", "1"]) == 0
    assert kernels.main([*arguments, "^fast_ap/dense", "--memory-limit", "1e-6"]) == 0
    notes = [(row["ms"], row["note"]) for row in rows_of(path)]
    assert notes == [
        ("", "out of memory"),
        ("", "skipped: torch.compile: no compiler"),
        ("", "over the limit: needs about 0 GB"),
    ]
    monkeypatch.setattr(rankgrad.RamboAPLoss, "from_scores", breaks)
    assert kernels.main([*arguments, "vector .*relevant=1%"]) == 1
    rows = rows_of(path)[3:]
    assert [bool(row["ms"]) for row in rows] == [True, True, False]
    assert rows[-1]["note"].startswith("broken: RuntimeError: out of shared memory; check: broken: ")
    assert "broken: rambo_ap/ours/vector N=500" in capsys.readouterr().out


@pytest.mark.usefixtures("no_interpreter")
def test_a_wrong_loss_is_found_before_it_is_timed(tmp_path, capsys, monkeypatch):
    def wrong(loss, *, backend="", precision="auto", unit=False):
        module = loss_of(loss, backend="tiled")
        return module if backend else lambda *inputs: 1.1 * module(*inputs)

    loss_of = kernel_runner.loss_of
    monkeypatch.setattr(kernel_runner, "loss_of", wrong)
    path = tmp_path / "rows.csv"
    assert kernels.main(["--cpu-check", "--only", "^smooth_ap/ours N=32 .*high", "--csv", str(path)]) == 1
    (row,) = rows_of(path)
    assert row["note"].startswith("check: value off by ")
    assert "as far off as plain torch" in row["note"]
    assert "wrong: smooth_ap high" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.main([]) == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert kernels.main(["--cpu-check"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


def test_rows_can_be_listed_and_chosen(capsys):
    assert kernels.main(["--list", "--only", "rambo_recall/ours N=65536 "]) == 0
    names = capsys.readouterr().out.split("\n")[:-1]
    assert names == [f"rambo_recall/ours N=65536 relevant=3 d=512 {precision}" for precision in kernel_cases.PRECISIONS]
    for pattern, message in (("nothing", "no row matches 'nothing'"), ("(", "not a regular expression")):
        with pytest.raises(SystemExit, match="2"):
            kernels.main(["--only", pattern])
        assert message in capsys.readouterr().err


def write_measurements(path):
    """A file as a GPU would leave it, with one size measured twice and the dense formulation at its end."""
    columns = COLUMNS.split(",")
    rows = []

    def add(row, n, precision, ms, megabytes, note="", relevant="3"):
        values = {"gpu": "NVIDIA H200", "row": row, "N": n, "relevant": relevant, "d": 512, "precision": precision}
        rows.append(dict.fromkeys(columns, "") | values | {"ms": ms, "MB": megabytes, "note": note})

    add("recall_at_k/ours", 4096, "fast", 99, 99)
    for n in (4096, 16384, 65536, 262144):
        for precision, factor in (("fast", 1), ("high", 3)):
            add("recall_at_k/ours", n, precision, factor * n**2 / 1e8, factor * n / 100, note="met")
        add("recall_at_k/chunked", n, "float16", n**2 / 5e7, n / 40)
        add("products/floor", n, "float16", n**2 / 2e8, "")
    for n in (4096, 16384):
        add("recall_at_k/dense", n, "float32", n**2 / 6e6, n**2 / 3e4)
    add("recall_at_k/dense", 262144, "float32", "", "", "over the limit: needs about 3000 GB")
    add("recall_at_k/dense", 65536, "float32", "", "", "out of memory")
    add("recall_at_k/ours/gallery", "16384x65536", "fast", 5, 5, relevant="4")
    add("recall_at_k/ours", 65530, "fast", 5, 5, relevant="9")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def test_curves_take_the_latest_numbers_and_know_where_they_end(tmp_path):
    write_measurements(tmp_path / "rows.csv")
    curves = {curve.style.label: curve for curve in plot.curves_of(rows_of(tmp_path / "rows.csv"), "recall_at_k", "3", "512")}
    assert list(curves) == [style.label for style in plot.STYLES]
    assert [n for n, *_ in curves["rankgrad, fast"].points] == [4096, 16384, 65536, 262144]
    assert curves["rankgrad, fast"].points[0] == (4096, pytest.approx(0.168, rel=1e-2), 40.96)
    assert curves["all scores at once, float32"].end == 65536
    assert curves["rankgrad, fast"].end is None
    assert curves["matrix products alone, float16"].points[0][2] is None


def test_the_picture_is_written_and_the_same_twice(tmp_path, capsys):
    write_measurements(tmp_path / "rows.csv")
    pictures = [tmp_path / "a.png", tmp_path / "a.svg", tmp_path / "new" / "b.svg"]
    for picture in pictures:
        assert plot.main([str(tmp_path / "rows.csv"), str(picture)]) == 0
    width, height = struct.unpack(">II", pictures[0].read_bytes()[16:24])
    assert (width, height) == (1920, 896)
    assert "<svg" in pictures[1].read_text()
    assert pictures[1].read_bytes() == pictures[2].read_bytes()
    assert plot.main([str(tmp_path / "rows.csv"), str(tmp_path / "no.svg"), "--loss", "fast_ap"]) == 1
    assert "no times of fast_ap" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        plot.main([str(tmp_path / "missing.csv"), "out.svg"])


def test_names_of_rows():
    case = Case("recall_at_k", "ours", Shape(16384, "4", 512, "gallery", 65536), "fast")
    assert case.key == "recall_at_k/ours/gallery N=16384x65536 relevant=4 d=512 fast"
    assert case.target is None
