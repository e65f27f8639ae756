"""The benchmark of Table 6 on short lists."""

import csv

import pytest
import torch
from benchmarks import list_ap


def test_the_algorithms_agree_about_value_and_gradient():
    scores, relevant = list_ap.make_list(3000, 0.05, torch.device("cpu"))
    scores = scores.double() + 1e-9 * torch.arange(3000)  # no two are equal
    found = {name: call() for name, call in list_ap.calls(scores, relevant).items()}
    value, gradient = found.pop("ours")
    assert 0.05 < float(value) < 0.95
    assert int((gradient != 0).sum()) > 100
    for other, slopes in found.values():
        assert float(other) == pytest.approx(float(value), abs=1e-9)
        torch.testing.assert_close(slopes, gradient, rtol=1e-9, atol=1e-12)


def test_rows_are_printed_and_kept(tmp_path, capsys):
    before = torch.get_num_threads()
    file = tmp_path / "ap.csv"
    arguments = ["--lengths", "500,100k", "--threads", "1", "--devices", "cpu", "--seconds", "0.01", "--rounds", "1"]
    assert list_ap.main([*arguments, "--csv", str(file)]) == 0
    told = capsys.readouterr().out
    assert "paper, six argsorts" in told
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["length"] for row in rows] == ["500"] * 3 + ["100000"] * 3
    assert rows[3]["published_ms"] == "33"
    assert float(rows[0]["ms"]) > 0
    assert float(rows[2]["time_ratio"]) == 1
    assert torch.get_num_threads() == before


def test_an_algorithm_that_disagrees_is_reported(monkeypatch, capsys):
    right = list_ap.sorts.two_sorts_ap

    def wrong(scores, relevant):
        value, gradient = right(scores, relevant)
        return value, -gradient

    monkeypatch.setattr(list_ap.sorts, "two_sorts_ap", wrong)
    assert list_ap.main(["--quick", "--threads", "1", "--devices", "cpu"]) == 1
    assert "DISAGREES with ours" in capsys.readouterr().out


def test_a_list_that_does_not_fit_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(list_ap, "free_memory", lambda device: 1000)
    assert list_ap.main(["--quick", "--threads", "1", "--devices", "cpu"]) == 0
    assert "skipped: needs about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "ten"], "numbers of at least 2 such as 100k or 10M wanted, got 'ten'"),
        (["--threads", "0"], "numbers of at least 1 with commas between wanted, got 0"),
        (["--devices", "tpu"], "cpu and cuda are known, got 'tpu'"),
        (["--relevant", "1"], "--relevant must lie between 0 and 1, got 1.0"),
    ],
)
def test_wrong_flags_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        list_ap.main(arguments)
    assert message in capsys.readouterr().err
