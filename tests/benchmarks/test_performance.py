"""The tables of docs/performance.md come from the files of the runs."""

import csv

import pytest
from benchmarks import performance
from benchmarks.performance import PAGES, RESULTS, evaluation, filled, fits, growth, power, rates


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


def test_rates_have_their_share_of_the_bare_loop():
    row = {"model": "lite0", "pixels": "112", "batch": "400", "cut": "whole", "images_per_second": "20000", "note": ""}
    table = rates([row | {"stage": "bare", "of_bare": "1.000"}, row | {"stage": "step", "of_bare": "0.947"}])
    assert "EfficientNet-Lite0, 112 px" in table
    assert "| 20,000       " in table.splitlines()[2]
    assert "20,000 (95%)" in table.splitlines()[3]


def test_evaluations_are_in_processor_time_and_say_why_there_is_none():
    row = {"N": "5000", "formulation": "ours", "threads": "1", "core_seconds": "0.41", "peak_bytes": "48e6", "note": ""}
    two = row | {"threads": "2", "core_seconds": "0.5"}  # threads that share a cache wait for each other
    other = row | {"N": "20000", "formulation": "other", "core_seconds": "", "note": "skipped: needs about 30 GB"}
    lines = evaluation([row, other, two]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:4]] == ["5,000", "410 ms, 48 MB", ""]
    assert "needs about 30 GB" in lines[3]


def test_check_says_whether_the_page_is_up_to_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGES[0].read_text(encoding="utf-8"))
    monkeypatch.setattr(performance, "PAGES", (page,))
    assert performance.main(["--check"]) == 0
    page.write_text(page.read_text().replace("N^1.00", "N^0.50", 1))
    assert performance.main(["--check"]) == 1
    assert performance.main([]) == 0
    assert performance.main(["--check"]) == 0
    assert "not what python -m benchmarks.performance writes" in capsys.readouterr().out
