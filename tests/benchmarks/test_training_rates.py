import csv

import pytest
from benchmarks.training_rates import all_cases, main


def test_every_network_has_its_limit_before_what_is_compared_with_it():
    seen = set()
    for case in all_cases():
        seen.add((case.stage, case.model, case.batch))
        if case.stage in {"step", "train", "metric-learning"}:
            assert ("bare", case.model, min(case.batch, 400)) in seen


def test_the_smallest_rows_run_and_are_written_as_they_come(tmp_path):
    assert (
        main(
            [
                "--device",
                "cpu",
                "--smallest",
                "--only",
                "^(decode|augment|bare|step).* (0|16) ",
                "--csv",
                str(tmp_path / "a.csv"),
            ]
        )
        == 0
    )
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["stage"] for row in rows] == ["decode", "augment", "bare", "step", "step", "step"]
    assert all(int(row["images_per_second"]) > 0 for row in rows)
    assert rows[2]["of_bare"] == "1.000"


def test_a_pattern_that_matches_nothing_names_the_rows(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "decode resnet50 224" in capsys.readouterr().err
