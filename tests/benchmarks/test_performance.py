"""The tables of docs/performance.md come from the files of the runs."""

import csv
import re

import pytest
from benchmarks import performance
from benchmarks.performance import (
    PAGES,
    RESULTS,
    cpu_loss,
    evaluation,
    evaluation_time,
    filled,
    first_call,
    fits,
    growth,
    kernel,
    kernel_dates,
    power,
    rate,
    rates,
    share,
)


def test_the_pages_are_what_the_command_writes():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(text.count("<!-- table ") for text in texts) >= 3
    assert [filled(text, RESULTS) for text in texts] == texts, "run python -m benchmarks.performance"


def test_only_what_is_between_the_comments_is_made_again(tmp_path):
    with (tmp_path / "kernels-nvidia-h200.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(KERNEL))
        writer.writeheader()
        writer.writerows([KERNEL | {"N": str(n), "ms": str(n * n), "MB": str(n)} for n in (4096, 16384, 65536)])
    page = "before 17\n<!-- table growth -->\n| old | 99 |\n<!-- end -->\nafter 18\n"
    once = filled(page, tmp_path)
    assert once.startswith("before 17\n<!-- table growth -->\n| loss")
    assert once.endswith("<!-- end -->\nafter 18\n")
    assert "N^2.00 | N^2.00              | N^1.00" in once
    assert "99" not in once
    assert filled(once, tmp_path) == once


def test_a_table_that_nobody_makes_is_an_error():
    with pytest.raises(ValueError, match="no table 'unknown'; there are batch-sizes"):
        filled("<!-- table unknown -->\n<!-- end -->\n", RESULTS)
    with pytest.raises(ValueError, match="no figure 'unknown'; there are kernel"):
        filled("it takes <!-- figure unknown 7 -->9 ms<!-- end -->", RESULTS)
    with pytest.raises(ValueError, match="begins a line ends the paragraph: put a word before the figure 'million fast'"):
        filled("it takes\n  <!-- figure million fast -->9 s<!-- end -->", RESULTS)
    with pytest.raises(ValueError, match=r"no measured row recall_at_k/ours of size 77 with precision fast"):
        filled("it takes <!-- figure kernel recall_at_k/ours 77 fast time --><!-- end -->", RESULTS)


def test_figures_in_a_sentence_are_those_of_the_last_row():
    rows = [
        KERNEL | {"N": "65536", "ms": ms, "MB": "800", "date": f"2026-0{month}-01T10:00"}
        for month, ms in ((1, "40"), (2, "64"))
    ]
    rows += [KERNEL | {"N": "65536", "ms": "7", "MB": "8", "relevant": "9"}, KERNEL | {"N": "65536", "ms": "9", "d": "64"}]
    assert kernel(rows, "recall_at_k/ours", "65536", "fast", "time") == "64 ms"
    assert kernel(rows, "recall_at_k/ours", "65536/9", "fast", "time") == "7.0 ms"
    assert kernel(rows, "recall_at_k/ours", "65536", "fast", "memory") == "800 MB"
    # 2 / 64 of the time; 65,536 x 512 embeddings and gradients of 4 bytes beside the memory
    assert kernel(rows, "recall_at_k/ours", "65536", "fast", "time-of-64") == "2.0 ms"
    assert kernel(rows, "recall_at_k/ours", "65536", "fast", "memory-of-64") == "1.1 GB"
    assert kernel_dates(rows[:2]) == "2026-02-01"
    assert kernel_dates([*rows[:2], rows[0] | {"N": "4096"}]) == "2026-01-01 to 2026-02-01"


def test_first_calls_stand_beside_those_with_kernels_one_by_one():
    row = {"loss": "recall_at_k", "precision": "fast", "kernels": "at the same time", "with a filled cache": "1"}
    alone = row | {"kernels": "one by one", "first call": "8.8"}
    rows = [row | {"first call": "9"}, row | {"first call": "2.94"}, alone, row | {"first call": "3", "precision": "high"}]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first_call(rows).splitlines()[2:]]
    assert cells == [["RS@k, fast", "2.9 s", "8.8 s", "1.0 s"], ["RS@k, high", "3.0 s", "", "1.0 s"]]
    assert "one by one" not in first_call(rows[:2])


def test_a_rate_in_a_sentence_is_that_of_its_cut():
    row = {"stage": "step", "model": "lite0", "batch": "400", "images_per_second": "20000"}
    rows = [row | {"cut": "whole"}, row | {"cut": "chunks of 100, keep none", "images_per_second": "12345"}]
    assert rate(rows, "step", "lite0", "400", "none") == "12,345"
    assert (
        share([*rows, row | {"stage": "bare", "cut": "whole", "images_per_second": "24690"}], "step", "lite0", "400", "none")
        == "50%"
    )
    with pytest.raises(ValueError, match="no measured row step lite0 of batch 128, whole"):
        rate(rows, "step", "lite0", "128", "whole")


def test_only_the_figure_in_a_sentence_is_made_again():
    page = "before <!-- figure million fast -->9 s<!-- end --> and <!-- figure million high -->8 s<!-- end --> after 7 s\n"
    once = filled(page, RESULTS)
    assert re.sub(r"\d+\.\d", "9", once) == page.replace("8 s", "9 s")
    assert filled(once, RESULTS) == once


KERNEL = {"row": "recall_at_k/ours", "N": "", "relevant": "3", "d": "512", "precision": "fast", "ms": "", "MB": "", "note": ""}


def test_powers_are_least_squares_of_logarithms():
    assert power({n: 3e-7 * n**1.5 for n in (10, 100, 5000)}) == pytest.approx(1.5)
    assert power({1: 1.0, 2: 2.0, 4: 8.0}) == pytest.approx(1.5)


def test_a_loss_of_one_size_has_no_growth():
    table = growth([KERNEL | {"N": "65536", "ms": "40", "MB": "800"}])
    assert "RS@k" not in table


def test_items_that_fit_are_rounded_down():
    # 1,000 bytes an item beyond 2 x 2,048 of embeddings and gradient, in 80% of the memory
    table = fits([KERNEL | {"N": "1000000", "ms": "1", "MB": "1000"}])
    assert "5.1 kB" in table
    assert f"{int(24 * 2**30 * 0.8 / 5096):,}".startswith("4,04")
    assert "4,000,000" in table


def test_rates_have_their_share_of_the_bare_loop_with_as_many_images_in_a_pass():
    row = {"model": "lite0", "pixels": "112", "batch": "400", "cut": "whole", "images_per_second": "20000", "note": ""}
    chunks = {"stage": "step", "batch": "4000", "images_per_second": "15000"}
    rows = [
        row | {"stage": "train", "images_per_second": "18940"},
        row | chunks | {"cut": "chunks of 400, keep none"},
        row | chunks | {"cut": "chunks of 100, keep none"},
        row | {"stage": "decode", "batch": "0", "images_per_second": "900", "note": "3 cores busy"},
        row | {"stage": "bare", "images_per_second": "1"},
        row | {"stage": "bare"},
    ]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rates(rows).splitlines()]
    assert table[0][3] == "EfficientNet-Lite0, 112 px"
    assert table[2:] == [
        ["decode", "", "whole", "900, 3 cores busy"],
        ["bare", "400", "whole", "20,000"],
        ["step", "4,000", "chunks of 100, keep none", "15,000"],
        ["step", "4,000", "chunks of 400, keep none", "15,000 (75%)"],
        ["train", "400", "whole", "18,940 (95%)"],
    ]


def test_the_share_of_a_compiled_network_is_of_a_compiled_loop_and_one_that_failed_has_none():
    row = {"model": "lite0", "pixels": "112", "batch": "400", "cut": "whole, compiled", "images_per_second": "900", "note": ""}
    plain = row | {"cut": "whole"}
    rows = [row | {"stage": "step"}, row | {"stage": "bare", "images_per_second": "1000"}]
    rows += [plain | {"stage": "step"}, plain | {"stage": "bare", "images_per_second": "", "note": "out of memory"}]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rates(rows).splitlines()]
    assert [line[3] for line in lines[2:]] == ["out of memory", "1,000", "900", "900 (90%)"]


def test_evaluations_are_in_processor_time_and_say_why_there_is_none():
    row = {"N": "5000", "formulation": "ours", "threads": "1", "core_seconds": "0.41", "peak_bytes": "48e6", "note": ""}
    two = row | {"threads": "2", "core_seconds": "0.5"}  # threads that share a cache wait for each other
    other = row | {"N": "20000", "formulation": "other", "core_seconds": "", "note": "skipped: needs about 30 GB"}
    lines = evaluation([row, other, two]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:4]] == ["5,000", "410 ms, 48 MB", ""]
    assert "needs about 30 GB" in lines[3]


def test_times_on_a_cpu_are_of_the_last_row_of_as_many_threads():
    row = {"loss": "fast_ap", "formulation": "ours", "N": "4096", "threads": "2", "seconds": "0.3", "machine": "Intel(R) Xeon"}
    rows = [row, row | {"seconds": "0.1034", "machine": "AMD EPYC"}, row | {"threads": "1", "seconds": "0.2"}]
    assert cpu_loss(rows, "fast_ap", "ours", "4096", "2") == "103 ms"
    assert evaluation_time(rows, "4096", "2", "Intel") == "300 ms"
    assert evaluation_time(rows, "4096", "2", "AMD") == "103 ms"
    with pytest.raises(ValueError, match="no measured row ours of fast_ap at 4096 with 3 threads"):
        cpu_loss(rows, "fast_ap", "ours", "4096", "3")
    with pytest.raises(ValueError, match="no measured evaluation of 4096 items with 1 threads on AMD"):
        evaluation_time(rows, "4096", "1", "AMD")


def test_check_says_whether_the_page_is_up_to_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGES[0].read_text(encoding="utf-8"))
    monkeypatch.setattr(performance, "PAGES", (page,))
    assert performance.main(["--check"]) == 0
    page.write_text(page.read_text().replace("| N^1", "| N^0", 1))
    assert performance.main(["--check"]) == 1
    assert performance.main([]) == 0
    assert performance.main(["--check"]) == 0
    assert "not what python -m benchmarks.performance writes" in capsys.readouterr().out
