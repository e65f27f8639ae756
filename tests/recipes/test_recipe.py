"""A recipe checks itself, and the command line is its settings."""

import argparse
import re

import pytest

from rankgrad.cli.parser import Parser, add_settings, as_flags, changed_settings, flag_of
from rankgrad.recipes.catalogue import RECIPES, find
from rankgrad.runs.recipe import GROUPS, SETTINGS, Recipe


def parser() -> Parser:
    made = Parser("rankgrad train", "trains")
    add_settings(made)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "fastpa"}, "loss must be one of fastap, .*, got 'fastpa': did you mean 'fastap'?"),
        ({"data_set": "sopp"}, "did you mean 'sop'"),
        ({"test_on": ("roxford",)}, "test_on must be one of .*did you mean 'roxford5k'"),
        ({"size": 3}, "size must be between 16 and 2,048, got 3"),
        ({"bins": 0}, "bins must be at least 1, got 0"),
        ({"bins": 2.5}, "bins must be an integer, got 2.5"),
        ({"bins": True}, "bins must be an integer, got True"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"lr": "fast"}, "lr must be a finite number, got 'fast'"),
        ({"simix": "yes"}, "simix must be true or false, got 'yes'"),
        ({"ks": (1, 0)}, "ks must be at least 1, got 0"),
        ({"ks": "1,2"}, "ks must be several values"),
        ({"keep": "all"}, "keep must be 'auto' or an integer, got 'all'"),
        ({"trunk": 50}, "trunk must be text, got 50"),
        ({"batch_size": 10}, r"batch_size must be a multiple of per_class \(4\), got 10; 8 or 12 is"),
        ({"per_class": 1}, "per_class must be at least 2"),
        ({"sampler": "category-hard"}, "batch_size must be given for the sampler 'category-hard'"),
        ({"simix": True, "memory": 1}, "simix and memory exclude each other"),
        ({"batch_norm": "live", "chunk_size": 8, "batch_size": 16}, "batch_norm 'live' needs the whole batch at once"),
        ({"batch_norm": "live", "chunk_size": "auto"}, "batch_norm 'live' needs the whole batch at once"),
        ({"schedule": "step"}, "schedule 'step' needs milestones"),
        ({"milestones": (3,)}, "milestones 3 need the schedule 'step', got 'constant'"),
        ({"schedule": "step", "milestones": (3, 2)}, "milestones must ascend, got 3, 2"),
        ({"whiten": True, "dim": 0}, "whiten needs a linear layer"),
        ({"stored_side": 100}, r"stored_side must be at least size \(224\), got 100"),
        ({"batchsize": 8}, "there is no setting 'batchsize': did you mean 'batch_size'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(name="mine").with_settings(changes)


def test_a_live_batch_norm_may_have_a_chunk_of_the_whole_batch():
    assert Recipe(name="mine", batch_norm="live", batch_size=16, chunk_size=16).chunk_size == 16


def test_another_schedule_drops_the_milestones():
    assert find("sop-recall-at-k").with_settings({"schedule": "cosine"}).milestones == ()
    assert find("sop-recall-at-k").with_settings({"lr": 1.0}).milestones == (25, 50)


def test_stored_side_follows_size():
    assert Recipe(name="mine").stored == 256
    assert Recipe(name="mine", size=112).stored == 128
    assert Recipe(name="mine", size=112, stored_side=112).stored == 112


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_flags_make_any_recipe_of_any_other(recipe):
    for base in (Recipe(name=recipe.name), find("cars-recall-at-k-vit-b16")):
        flags = as_flags(recipe, base)
        assert base.with_settings(changed_settings(parser().parse(flags))).settings() == recipe.settings()


def test_every_setting_is_a_flag_with_help():
    text = parser().format_help()
    for name, entry in SETTINGS.items():
        assert re.search(rf"^  {flag_of(name)}\b", text, re.MULTILINE), name
        assert entry.metadata["about"]
    assert all(f"\n{group}:\n" in text for group in GROUPS.values())


def test_flags_that_are_not_given_change_nothing():
    assert changed_settings(parser().parse([])) == {}
    assert changed_settings(parser().parse(["--no-flip", "--ks", "1, 5", "--keep=3", "--batch-size", "1_000"])) == {
        "flip": False,
        "ks": (1, 5),
        "keep": 3,
        "batch_size": 1000,
    }
    assert changed_settings(argparse.Namespace(out="x", milestones="")) == {"milestones": ()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchsize", "3"], "rankgrad train: unknown flag --batchsize: did you mean --batch-size?\n"),
        (["--simx"], "rankgrad train: unknown flag --simx: did you mean --simix?\n"),
        (["--learning=3"], "rankgrad train: unknown flag --learning"),
        (["--zzzzzzzz"], "rankgrad train: unknown flag --zzzzzzzz; --help lists all\n"),
        (["--bins"], "rankgrad train: argument --bins: expected one argument\n"),
        (["--batch", "3"], "rankgrad train: unknown flag --batch"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse(arguments)
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bins", "ten"], "--bins must be an integer, got 'ten'"),
        (["--loss", "fastpa"], "--loss must be one of .*did you mean 'fastap'"),
        (["--size", "4"], "--size must be between 16 and 2,048, got 4"),
        (["--ks", "1,x"], "--ks must be an integer, got 'x'"),
    ],
)
def test_a_wrong_value_names_its_flag(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        changed_settings(parser().parse(arguments))
