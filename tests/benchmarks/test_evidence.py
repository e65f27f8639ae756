"""The page of evidence: every figure comes from the files of the runs."""

import csv
import re

import pytest
from benchmarks.evidence import NOTICE, Evidence, main, page

ROWS = [
    ("loss", "A", 0, "test", 0.50, 0.48, 0.52),
    ("loss", "A", 1, "test", 0.54, 0.52, 0.56),
    ("loss", "B", 0, "test", 0.60, 0.58, 0.62),
    ("loss", "B", 1, "test", 0.70, "", ""),
    ("loss", "B", 0, "validation", 0.99, "", ""),
    ("other", "A", 0, "test", 0.50, 0.48, 0.52),
    ("other", "C", 1, "test", 0.55, "", ""),
]


@pytest.fixture
def evidence(tmp_path):
    columns = ("group", "label", "seed", "split", "R@1", "R@1 low", "R@1 high", "changes")
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *((*row, "lr=1 tau=2") for row in ROWS)])
    with (tmp_path / "runs-curves.csv").open("w", newline="") as file:
        points = [("loss", label, seed, "test", epoch, 0.1 * epoch) for label in "AB" for seed in (0, 1) for epoch in (2, 1)]
        csv.writer(file).writerows([("group", "label", "seed", "split", "epoch", "R@1"), *points])
    return Evidence(tmp_path, tmp_path)


def test_fields_are_computed_from_the_runs(evidence):
    def filled(field):
        return page("{{ " + field + " }}", evidence).removeprefix(NOTICE)

    assert filled("mean runs A R@1") == "52.0"
    assert filled("gain runs B A R@1") == "+13.0"
    assert filled("gain runs A B R@1") == "-13.0"
    assert filled("gain runs C A R@1") == "+1.0", "seed 1 alone"
    assert filled("best runs loss R@1") == "B"
    assert filled("least runs loss R@1") == "52.0"
    assert filled("most runs loss R@1") == "65.0"
    assert filled("values runs B R@1") == "60.0, 70.0"
    assert "lr=1 tau=2: 99.0" in filled("tried runs R@1")
    assert "| A" not in filled("tried runs R@1")
    # an interval only where all seeds have one; runs that chose settings are not results
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in filled("table runs loss R@1").splitlines()]
    assert [lines[0], *lines[2:]] == [["loss", "R@1"], ["A", "52.0 ± 2.8 [50.0, 54.0]"], ["B", "65.0 ± 7.1"]]


def test_a_difference_that_rounds_to_nothing_has_no_minus(tmp_path):
    rows = ("group,label,seed,split,R@1", "loss,A,0,test,0.5", "loss,B,0,test,0.5001")
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    assert page("{{ gain runs A B R@1 }}", Evidence(tmp_path, tmp_path)).removeprefix(NOTICE) == "+0.0"


def test_curves_are_drawn_beside_the_page(evidence, tmp_path):
    text = page("{{ curves runs loss R@1 'R@1 over training' }}", evidence)
    assert text == f"{NOTICE}![R@1 over training](images/runs-loss-r-1.svg)"
    first = (tmp_path / "images" / "runs-loss-r-1.svg").read_text()
    page("{{ curves runs loss R@1 'R@1 over training' }}", evidence)
    assert (tmp_path / "images" / "runs-loss-r-1.svg").read_text() == first, "the same runs draw the same file"


def test_a_section_without_runs_is_left_out(evidence):
    text = "{{ if runs }}\nthere\n{{ if runs 'nothing' }}\nno\n{{ end }}\n{{ if runs loss }}\nyes\n{{ end }}\n{{ end }}\n"
    text += "{{ if none }}\nnot there {{ mean none A R@1 }}\n{{ end }}\nend\n"
    assert page(text, evidence) == f"{NOTICE}there\nyes\nend\n"


@pytest.mark.parametrize(
    "field", ["mean runs D R@1", "mean none A R@1", "mean runs A R@7", "table runs nothing R@1", "median x"]
)
def test_wrong_fields_are_named(evidence, field):
    with pytest.raises(ValueError, match=re.escape(field)):
        page("{{ " + field + " }}", evidence)


def test_the_page_is_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out
