"""A recipe checks itself, and the command line is its settings."""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from textwrap import dedent
from typing import get_args

import pytest

from rankgrad.cli.parser import Parser, add_settings, changed_settings, in_flags, without_caller
from rankgrad.data.preprocessing import Crop
from rankgrad.data.readers import READERS
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.models.trunks import trunk_names
from rankgrad.recipes.catalogue import find, recipes_of
from rankgrad.runs.recipe import Group, Recipe, flag_of, setting, settings_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe


def parser() -> Parser:
    made = Parser("rankgrad train", "trains")
    add_settings(made, RetrievalRecipe)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "fastpa"}, "`loss` must be one of .*fastap, .*, got 'fastpa': did you mean 'fastap'?"),
        ({"data_set": "sopp"}, "did you mean 'sop'"),
        ({"test_on": ("roxford",)}, "`test_on` must be one of .*did you mean 'roxford5k'"),
        ({"size": 3}, "`size` must be between 16 and 2,048, got 3"),
        ({"bins": 0}, "`bins` must be at least 1, got 0"),
        ({"bins": 2.5}, "`bins` must be an integer, got 2.5"),
        ({"bins": True}, "`bins` must be an integer, got True"),
        ({"lr": float("nan")}, "`lr` must be a finite number, got nan"),
        ({"lr": "fast"}, "`lr` must be a finite number, got 'fast'"),
        ({"simix": "yes"}, "`simix` must be true or false, got 'yes'"),
        ({"ks": (1, 0)}, "`ks` must be at least 1, got 0"),
        ({"ks": "1,2"}, "`ks` must be several values"),
        ({"keep": "all"}, "`keep` must be 'auto' or an integer, got 'all'"),
        ({"trunk": 50}, "`trunk` must be text, got 50"),
        ({"batch_size": 10}, r"`batch_size` must be a multiple of `per_class` \(4\), got 10; use 8 or 12"),
        ({"per_class": 1}, "`per_class` must be at least 2"),
        ({"sampler": "category-hard"}, "`sampler='category-hard'` needs a `batch_size`"),
        ({"simix": True, "memory": 1}, "`simix` and `memory` exclude each other"),
        ({"batch_norm": "live", "chunk_size": 8, "batch_size": 16}, "`batch_norm='live'` needs the whole batch at once"),
        ({"batch_norm": "live", "chunk_size": "auto"}, "`batch_norm='live'` needs the whole batch at once"),
        ({"schedule": "step"}, "mine: `schedule='step'` needs `milestones`"),
        ({"milestones": (3,)}, "`milestones` are for `schedule='step'`, got `schedule='constant'`"),
        ({"schedule": "step", "milestones": (3, 2)}, "`milestones` must ascend, got 3, 2"),
        ({"whiten": True, "dim": 0}, "`whiten` initialises the linear layer"),
        ({"stored_side": 100}, r"`stored_side` must be at least `size` \(224\), got 100"),
        ({"train_side": 100}, r"`train_side` must be at least `size` \(224\), got 100"),
        ({"warmup": 1.0, "warmup_steps": 5}, "give the warm-up in steps or in epochs"),
        ({"l2_pooled": True}, "mine: .*layer_norm.*l2_pooled"),
        ({"dim": 10**9}, "`dim` must be between 0 and 65,536, got 1000000000"),
        ({"batchsize": 8}, "there is no setting 'batchsize': did you mean 'batch_size'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RetrievalRecipe(name="mine").with_settings(changes)


def test_a_live_batch_norm_may_have_a_chunk_of_the_whole_batch():
    assert RetrievalRecipe(name="mine", batch_norm="live", batch_size=16, chunk_size=16).chunk_size == 16


def test_another_schedule_drops_the_milestones():
    assert find("sop-recall-at-k").with_settings({"schedule": "cosine"}).milestones == ()
    assert find("sop-recall-at-k").with_settings({"lr": 1.0}).milestones == (25, 50)


def test_stored_side_follows_size():
    assert RetrievalRecipe(name="mine").stored == 256
    assert RetrievalRecipe(name="mine", size=112).stored == 128
    assert RetrievalRecipe(name="mine", size=112, stored_side=112).stored == 112


@pytest.mark.parametrize("recipe", recipes_of(RetrievalRecipe).values(), ids=recipes_of(RetrievalRecipe))
def test_flags_make_any_recipe_of_any_other(recipe):
    for base in (RetrievalRecipe(name=recipe.name), find("cars-recall-at-k-vit-b16")):
        flags = []
        for name, (value, _) in recipe.differences(base).items():
            if isinstance(value, bool):
                flags.append(flag_of(name) if value else flag_of(f"no_{name}"))
            else:
                flags.append(f"{flag_of(name)}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
        assert base.with_settings(changed_settings(parser().parse(flags), RetrievalRecipe)).settings() == recipe.settings()


def test_every_setting_is_a_flag_with_help():
    text = parser().format_help()
    for name, entry in settings_of(RetrievalRecipe).items():
        assert re.search(rf"^  {flag_of(name)}\b", text, re.MULTILINE), name
        assert entry.help
        # every choice is named, in the help or in what stands for the value
        shown = " ".join(text.partition(f"\n  {flag_of(name)}")[2].split("\n  --")[0].replace("-\n", "-").split())
        assert all(choice in shown.replace("- ", "-") for choice in entry.choices), name
    headings = re.findall(r"^([a-z ]+):$", text, re.MULTILINE)
    assert headings[-len(get_args(Group)) :] == list(get_args(Group)), "in the order of the schema"


def test_flags_that_are_not_given_change_nothing():
    assert changed_settings(parser().parse([]), RetrievalRecipe) == {}
    assert changed_settings(
        parser().parse(["--no-flip", "--ks", "1, 5", "--keep=3", "--batch-size", "1_000"]), RetrievalRecipe
    ) == {
        "flip": False,
        "ks": (1, 5),
        "keep": 3,
        "batch_size": 1000,
    }
    assert changed_settings(argparse.Namespace(out="x", milestones=""), RetrievalRecipe) == {"milestones": ()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchsize", "3"], "rankgrad train: unknown flag --batchsize: did you mean --batch-size?\n"),
        (["--simx"], "rankgrad train: unknown flag --simx: did you mean --simix?\n"),
        (["--learning=3"], "rankgrad train: unknown flag --learning"),
        (["--zzzzzzzz"], "rankgrad train: unknown flag --zzzzzzzz: --help lists all\n"),
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
        (["--bins", "ten"], "`bins` must be an integer, got 'ten'"),
        (["--loss", "fastpa"], "`loss` must be one of .*did you mean 'fastap'"),
        (["--size", "4"], "`size` must be between 16 and 2,048, got 4"),
        (["--ks", "1,x"], "`ks` must be an integer, got 'x'"),
    ],
)
def test_a_wrong_value_names_its_setting(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        changed_settings(parser().parse(arguments), RetrievalRecipe)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("`batch_size` must be at least 2", "--batch-size must be at least 2"),
        ("use `batch_norm='frozen'` or `chunk_size=0`", "use --batch-norm frozen or --chunk-size 0"),
        ("`skip_bad=True`, `simix=False`", "--skip-bad, --no-simix"),
        ("`rankgrad recipes` lists `all`", "`rankgrad recipes` lists `all`"),
        ("lower batch_size to 8 or per_class", "lower --batch-size to 8 or --per-class"),
        ("pass skip_bad=True, batch_norm='frozen'.", "pass --skip-bad, --batch-norm frozen."),
        ("/data/batch_size/x.jpg, my_batch_size, batch_size.txt", "/data/batch_size/x.jpg, my_batch_size, batch_size.txt"),
    ],
)
def test_a_command_names_settings_as_flags(message, wanted):
    assert in_flags(message, settings_of(RetrievalRecipe)) == wanted


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("build_model: weights must be", "weights must be"),
        ("TrainSettings: lr must be", "lr must be"),
        ("evaluate: labels must be", "labels must be"),
        ("folder: /data does not exist", "folder: /data does not exist"),
        ("sop-recall-at-k: no", "sop-recall-at-k: no"),
        ("RANKGRAD_CACHE: no", "RANKGRAD_CACHE: no"),
        ("/a/b: no", "/a/b: no"),
        ("a sentence", "a sentence"),
    ],
)
def test_a_command_does_not_name_functions_of_the_library(message, wanted):
    assert without_caller(message) == wanted


def test_registries_and_literal_types_are_the_choices():
    known = settings_of(RetrievalRecipe)
    assert known["data_set"].choices == known["test_on"].choices == tuple(READERS)
    assert known["crop"].choices == get_args(Crop)
    assert known["keep"].choices == ("auto",)
    assert all(name in known["trunk"].help for name in trunk_names())


def test_a_preset_is_a_choice_of_the_command_line_where_it_is_defined():
    code = """
        import rankgrad as rg
        from rankgrad.losses.preset_registry import PRESETS, preset

        @preset("sharper-ap", tau="tau")
        class SharperAPLoss(rg.SmoothAPLoss):
            pass

        from rankgrad.cli.parser import Parser, add_settings, changed_settings
        from rankgrad.runs.retrieval_recipe import RetrievalRecipe

        parser = Parser("rankgrad train", "trains")
        add_settings(parser, RetrievalRecipe)
        changes = changed_settings(parser.parse(["--loss", "sharper-ap", "--tau", "0.005"]), RetrievalRecipe)
        recipe = RetrievalRecipe(name="mine").with_settings(changes)
        print(type(PRESETS[recipe.loss].build(recipe)).__name__, parser.format_help().count("sharper-ap"))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], check=True, capture_output=True, text=True)
    assert done.stdout == "SharperAPLoss 1\n"


def test_a_subclass_changes_a_default_alone():
    assert settings_of(DetectionRecipe)["lr"] == settings_of(Recipe)["lr"]
    assert DetectionRecipe(name="mine").lr == 0.1


def test_a_new_kind_of_recipe_declares_its_settings_once():
    @dataclass(frozen=True, kw_only=True)
    class TextRecipe(Recipe):
        length: int = setting(64, "tokens of a text", group="data", least=1)

    made = Parser("rankgrad", "trains")
    add_settings(made, TextRecipe)
    assert changed_settings(made.parse(["--length", "3"]), TextRecipe) == {"length": 3}
    assert TextRecipe(name="mine").with_settings({"length": 3}).settings()["length"] == 3
    with pytest.raises(ValueError, match="mine: `length` must be at least 1, got 0"):
        TextRecipe(name="mine", length=0)
