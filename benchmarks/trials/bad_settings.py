"""Settings on the command line that no recipe can have."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.trials.fuzz_case import Case, command
from rankgrad.recipes.catalogue import recipes_of
from rankgrad.runs.recipe import flag_of, settings_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe

VALUES = (
    *("", " ", "x", "-1", "0", "1.5", "1e400", "-1e400", "nan", "inf", "9" * 30, "9" * 400, "9" * 5000, "1__0", "1_000"),
    *("0x10", "None", "true", "yes", ",", ",,", "1,", "1,x", "3,2,1", "1,1", "0,1", "\u0663", "\u00bd", "../../etc/passwd"),
    *("/etc/passwd", "${HOME}", "$(touch x)", "`id`", "%s", "{0}", "'", '"', "x" * 5000, "__import__('os').system('id')"),
    *("!!python/object", "--"),
)
OTHERS = (
    *("--device", "--workers", "--cache", "--out", "--resume", "--data", "--batch", "--learning-rate", "--Lr", "--lr="),
    *("-x", "--", "--no-flip=1", "--flip=maybe", "--wandb", "--debug=1"),
)
GRIDS = ("lr=1e-3,1e-4", "lr", "=", "lr=", "x=1", "lr=x", "lr=nan,1", "seed=1,1")

# the others draw their images and would begin to train
ON_DISK = tuple(name for name, recipe in recipes_of(RetrievalRecipe).items() if recipe.data_set != "glyphs")


class Flags:
    """One or two odd flags of `rankgrad train`; where nothing is wrong with them the data that is not there is."""

    name = "flags"

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        nowhere = folder / "nowhere"
        flags = list[str]()
        names = [nowhere.name]
        for _ in range(rng.choice((1, 1, 1, 2))):
            setting = rng.choice(tuple(settings_of(RetrievalRecipe)))
            flag = flag_of(setting) if rng.random() < 0.8 else rng.choice(OTHERS)
            value = rng.choice(VALUES)
            flags += self._spelled(flag, value, rng)
            names += [flag.partition("=")[0], setting, setting.replace("_", " "), value.strip() or "''"]
        recipe = [] if rng.random() < 0.5 else [rng.choice(ON_DISK)]
        if rng.random() < 0.1:
            recipe = [rng.choice(("sop", "", "../x", "x" * 3000, "a\x1b[2J"))]
            names.append("recipe")
        verb = rng.choice(("train", "train", "train", "sweep"))
        grid = ("--grid", rng.choice(GRIDS)) if verb == "sweep" else ()
        names += ["--grid", *(part.partition("=")[0] for part in grid[1:])]
        place = ("--data", str(nowhere), "--device", "cpu", "--cache", "none", "--out", str(folder / "out"))
        arguments = [verb, *recipe, *place, *grid, *flags]
        return Case(" ".join([verb, *recipe, *grid, *flags])[:200], partial(command, *arguments), tuple(names), refused=True)

    def _spelled(self, flag: str, value: str, rng: random.Random) -> Sequence[str]:
        return [f"{flag}={value}"] if rng.random() < 0.7 else [flag, value]
