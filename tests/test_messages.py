import pytest

from rankgrad._messages import (
    did_you_mean,
    drop_empty_columns,
    first_ten,
    format_bytes,
    format_clock,
    format_duration,
    markdown_table,
    plural,
    printable,
    shorten,
    table,
)


def test_names_stand_to_the_left_and_numbers_to_the_right():
    text = table(
        ["loss", "R@1", "time", "protocol"], [["fastap", "91.0", "1.2 ms", "self"], ["rs@k", "100.0 ± 0.1", "", "in-shop"]]
    )
    assert text.split("\n") == [
        "loss            R@1    time  protocol",
        "fastap         91.0  1.2 ms  self",
        "rs@k    100.0 ± 0.1          in-shop",
    ]
    assert table(["a", "b"], [["1", "x"]], align="lr", indent="  ") == "  a  b\n  1  x"
    assert table(["name"], []) == "name"


def test_a_terminal_escape_in_a_cell_is_shown_and_not_obeyed():
    text = table(["class"], [["\x1b[31mred\x1b[0m"], ["two\nlines"], ["right\u202eleft"]])
    assert text.split("\n") == ["class", r"\x1b[31mred\x1b[0m", r"two\nlines", r"right\u202eleft"]
    assert printable("plain ä 字 é") == "plain ä 字 é"
    assert printable("\udcff\x07\x9b") == r"\udcff\x07\x9b"


def test_wide_characters_take_two_columns():
    assert table(["name", "n"], [["字母", "1"], ["abc", "20"]]).split("\n") == ["name   n", "字母   1", "abc   20"]


def test_markdown_is_aligned_and_escapes_its_separator():
    assert markdown_table(["loss", "R@1"], [["a|b", "9.0"], ["c", "10.0"]]).split("\n") == [
        "| loss |  R@1 |",
        "| ---- | ---: |",
        "| a\\|b |  9.0 |",
        "| c    | 10.0 |",
    ]


def test_columns_without_content_go():
    assert drop_empty_columns(["a", "b", "c"], [["1", "", "-"], ["2", "-", "x"]]) == (["a", "c"], [["1", "-"], ["2", "x"]])


def test_the_nearest_name_is_proposed():
    known = ("sop", "cub", "cars")
    assert did_you_mean("carz", known) == "did you mean 'cars'?"
    assert did_you_mean("zzz", known) == "choose one of sop, cub, cars"
    assert did_you_mean("zzz", known, otherwise="`rankgrad recipes` lists all") == "`rankgrad recipes` lists all"
    assert did_you_mean("--sed", ["--seed", "--split"]) == "did you mean --seed?"
    assert did_you_mean("resnet5", ["resnet50", "resnet51"], most=2) == "did you mean 'resnet51', 'resnet50'?"


def test_long_values_and_lists_are_cut():
    assert shorten("short") == "'short'"
    assert shorten("x" * 500) == f"'{'x' * 76}..."
    assert len(shorten(list(range(500)), width=20)) == 20
    assert "\x1b" not in shorten(type("Odd", (), {"__repr__": lambda self: "\x1b[2J"})())
    assert first_ten([f"line {i}" for i in range(1200)]).split("\n")[9:] == ["  line 9", "  and 1,190 more"]
    assert first_ten(["a\x1b"]) == "  a\\x1b"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80.0 GiB"), (3 * 2**40, "3.0 TiB"), (5 * 2**20, "5.0 MiB")],
)
def test_sizes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text", "clock"),
    [
        (0.0032, "3.2 ms", "0:00"),
        (4.13, "4.1 s", "0:04"),
        (48.2, "48 s", "0:48"),
        (723, "12 min 3 s", "12:03"),
        (19_200, "5 h 20 min", "5:20:00"),
    ],
)
def test_durations(seconds, text, clock):
    assert format_duration(seconds) == text
    assert format_clock(seconds) == clock


def test_one_thing_is_not_several():
    assert (plural(1, "file"), plural(0, "file"), plural(2000, "query", "queries")) == ("1 file", "0 files", "2,000 queries")


def test_the_last_column_is_broken_to_the_width_of_the_terminal():
    found = table(
        ["name", "meaning"], [("a", "one two three four five six seven eight"), ("bb", "nine")], indent="  ", width=40
    )
    assert found.split("\n") == [
        "  name  meaning",
        "  a     one two three four five six",
        "        seven eight",
        "  bb    nine",
    ]
    long = "x" * 50
    assert long in table(["name", "meaning"], [("a", f"see {long}")], width=40), "an address is not cut"
