"""The rows of the papers' tables: complete, consistent, and with the numbers that are printed."""

import re
import subprocess
import sys

import pytest

from rankgrad.cli.show_commands import describe_recipe, list_recipes
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.recipes.catalogue import RECIPES, find, recipes_of
from rankgrad.runs.retrieval_recipe import RetrievalRecipe

# typed from the papers' tables, independently of recipes/tables: recipe, split, metric, value, source
PRINTED = """
sop-fastap-r18-m256            test    R@1     73.2  FastAP, Table 1
sop-fastap-r18-m256            test    R@1000  97.8  FastAP, Table 1
sop-fastap-r50-m96-d128        test    R@10    88.0  FastAP, Table 1
sop-fastap-r50-m96             test    R@100   95.4  FastAP, Table 1
sop-fastap-r50-m256            test    R@1     76.4  FastAP, Table 1
sop-fastap-r50-m256            test    R@10    89.0  FastAP, Table 1
inshop-fastap-r18-m256         test    R@20    98.1  FastAP, Table 2
inshop-fastap-r50-m96          test    R@30    98.7  FastAP, Table 2
inshop-fastap-r50-m96          test    R@30    98.5  FastAP, supplement, Table 3
inshop-fastap-r50-m256         test    R@1     90.9  FastAP, Table 2
inshop-fastap-r50-m256         test    R@40    98.9  FastAP, Table 2
vehicleid-fastap-r18-m256      small   R@1     90.9  FastAP, Table 3
vehicleid-fastap-r50-m96       medium  R@5     95.4  FastAP, Table 3
vehicleid-fastap-r50-m256      large   R@1     87.5  FastAP, Table 3
vehicleid-fastap-r50-m256      large   R@5     95.1  FastAP, Table 3
sop-fastap-r18-m256-random     test    R@1     72.3  FastAP, supplement, Table 2
inshop-fastap-r18-m256-random  test    R@1     81.7  FastAP, supplement, Table 2
inshop-fastap-r50-m96-random   test    R@1     84.1  FastAP, supplement, Table 2
vehicleid-fastap-r50-m96-random large  R@1     82.8  FastAP, supplement, Table 2
vehicleid-fastap-r18-m256      large   R@1     85.3  FastAP, supplement, Table 2
sop-fastap-googlenet-m320      test    R@1     72.7  FastAP, supplement, Table 3
inshop-fastap-googlenet-m320   test    R@50    98.7  FastAP, supplement, Table 3
vehicleid-fastap-googlenet-m320 medium R@1     89.1  FastAP, supplement, Table 3
sop-rambo-log                  test    R@10    90.1  RaMBO, Table 2
sop-rambo-loglog               test    R@1     78.6  RaMBO, Table 2
cub-rambo-log                  test    R@4     84.1  RaMBO, Table 3
cub-rambo-loglog               test    R@8     90.6  RaMBO, Table 3
inshop-rambo-log               test    R@1     88.1  RaMBO, Table 4
inshop-rambo-log               test    R@50    98.8  RaMBO, Table 4
inshop-rambo-loglog            test    R@20    97.4  RaMBO, Table 4
cub-rambo-loglog               test    R@1     62.5  RaMBO, Table 7
cub-rambo-loglog-memory        test    R@1     64.0  RaMBO, Table 7
cub-rambo-loglog-no-margin     test    R@1     63.2  RaMBO, Table 7
inshop-rambo-log               test    R@1     87.0  RaMBO, Table 7
inshop-rambo-log-memory        test    R@1     88.1  RaMBO, Table 7
inshop-rambo-log-no-margin     test    R@1     None  RaMBO, Table 7
sop-rambo-loglog               test    R@1     72.4  RaMBO, Table 7
sop-rambo-loglog-memory        test    R@1     78.6  RaMBO, Table 7
sop-rambo-loglog-no-margin     test    R@1     None  RaMBO, Table 7
inat-recall-at-k-d128          test    R@16    90.6  RS@k, Table 2
sop-recall-at-k-d128           test    R@1     80.6  RS@k, Table 2
vehicleid-recall-at-k-d128     medium  R@1     94.4  RS@k, Table 2
cars-recall-at-k-simix-d128    test    R@1     84.7  RS@k, Table 2
inat-recall-at-k               test    R@1     71.2  RS@k, Table 2
sop-recall-at-k                test    R@1     82.8  RS@k, Table 2
sop-recall-at-k                test    R@1000  99.0  RS@k, Table 2
vehicleid-recall-at-k          large   R@5     96.6  RS@k, Table 2
cars-recall-at-k               test    R@2     88.3  RS@k, Table 2
cars-recall-at-k-simix         test    R@1     88.2  RS@k, Table 2
inat-recall-at-k-simix         test    R@32    94.3  RS@k, Table 2
sop-recall-at-k-vit-b32        test    R@10    94.6  RS@k, Table 2
vehicleid-recall-at-k-vit-b32  small   R@1     95.1  RS@k, Table 2
inat-recall-at-k-vit-b16       test    R@1     83.9  RS@k, Table 2
cars-recall-at-k-vit-b16       test    R@8     98.3  RS@k, Table 2
sop-recall-at-k-bs384          test    R@1     81.2  RS@k, section 4.3
cars-recall-at-k-bs588         test    R@2     93.3  RS@k, section 4.3
gldv1-recall-at-k              roxford5k      mAP[medium]  68.3  RS@k, Table 3
gldv1-recall-at-k              rparis6k+r1m   mAP[hard]    30.2  RS@k, Table 3
gldv1-recall-at-k-simix        roxford5k+r1m  mAP[medium]  51.0  RS@k, Table 3
gldv1-recall-at-k-simix        mean+r1m       mAP          41.8  RS@k, Table 3
gldv1-smooth-ap                rparis6k       mAP[hard]    63.3  RS@k, Table 3
inat-smooth-ap                 test    R@4     81.8  RS@k, Table 2
vehicleid-smooth-ap            medium  R@5     96.4  RS@k, Table 2
sop-smooth-ap-gem              test    R@10    92.0  RS@k, Table 2
cars-smooth-ap-vit-b16         test    R@1     86.2  RS@k, Table 2
cars-smooth-ap-bs392           test    R@1     79.5  RS@k, section 4.3
cars-smooth-ap-simix           test    R@4     94.3  RS@k, section 4.3
"""

# recipe, setting, value: the hyper-parameters that make a row what it is
SETTINGS_OF_ROWS = [
    ("sop-fastap-r50-m256", {"batch_size": 256, "chunk_size": 90, "batch_norm": "frozen", "epochs": 12, "lr": 1e-5}),
    ("sop-fastap-r50-m96", {"batch_norm": "live", "head_lr": 10.0, "weight_decay": 0.0, "batches_per_pair": 5, "epochs": 28}),
    ("sop-fastap-r50-m96-d128", {"dim": 128, "epochs": 30, "batch_size": 96, "sampler": "category-hard", "per_class": 0}),
    (
        "inshop-fastap-r18-m256",
        {"trunk": "resnet18", "batches_per_pair": 2, "epochs": 50, "aspect": "square", "crop": "random"},
    ),
    ("vehicleid-fastap-r50-m96", {"sampler": "category-half", "epochs": 40, "bins": 10, "pool": "avg"}),
    ("vehicleid-fastap-r18-m256-random", {"sampler": "whole-class", "batch_size": 256}),
    ("sop-rambo-loglog", {"lr": 3e-6, "lam": 4.0, "margin": 0.02, "memory": 0, "per_class": 4, "batches_per_pair": 10}),
    ("inshop-rambo-log", {"lr": 1e-5, "lam": 0.2, "margin": 0.05, "per_class": 8, "batches_per_pair": 4, "weighting": "log"}),
    (
        "cub-rambo-loglog",
        {
            "lr": 5e-6,
            "lam": 4.0,
            "crop": "resized",
            "pool": "gem",
            "sampler": "class-balanced",
            "milestones": (35,),
            "epochs": 80,
        },
    ),
    ("cub-rambo-loglog-no-margin", {"margin": 0.0, "memory": 0}),
    ("sop-rambo-loglog-memory", {"margin": 0.02, "memory": 3}),
    ("sop-recall-at-k", {"lr": 2e-4, "milestones": (25, 50), "epochs": 55, "batch_size": 4000, "chunk_size": 200}),
    ("cars-recall-at-k-simix", {"batch_size": 392, "epochs": 170, "ks": (1, 2, 4, 8, 12, 16, 20, 24, 28, 32), "simix": True}),
    ("cars-recall-at-k-bs588", {"batch_size": 588, "per_class": 6}),
    ("inat-recall-at-k-vit-b32", {"lr": 5e-5, "milestones": (10, 40, 70), "optimizer": "adamw", "pool": "cls", "epochs": 90}),
    ("vehicleid-recall-at-k-vit-b32", {"lr": 1e-4, "chunk_size": 200}),
    ("cars-recall-at-k-vit-b16", {"lr": 1e-5, "milestones": (20, 30, 40), "epochs": 50, "chunk_size": 100, "batch_size": 392}),
    ("gldv1-recall-at-k", {"batch_size": 4096, "steps": 500, "ks": (1, 2, 4), "dim": 2048, "whiten": True, "gem_lr": 10.0}),
    ("gldv1-recall-at-k-simix", {"ks": (1, 2, 4, 8), "simix": True, "layer_norm": False, "trunk": "resnet101"}),
    ("vehicleid-smooth-ap", {"lr": 1e-5, "milestones": (200, 300), "epochs": 400, "batch_size": 384, "pool": "avg"}),
    ("cars-smooth-ap-simix", {"batch_size": 392, "simix": True, "loss": "smooth-ap", "pool": "gem", "tau": 0.01}),
]


@pytest.mark.parametrize("line", [line for line in PRINTED.splitlines() if line])
def test_published_numbers(line):
    name, split, metric, value, source = re.split(r"\s+", line, maxsplit=4)
    found = [n.value for n in RECIPES[name].published if (n.split, n.metric, n.source) == (split, metric, source)]
    assert found == [None if value == "None" else float(value)]


@pytest.mark.parametrize(("name", "settings"), SETTINGS_OF_ROWS)
def test_settings_of_rows(name, settings):
    assert {key: getattr(RECIPES[name], key) for key in settings} == settings


def test_every_row_of_the_tables_is_there():
    def rows(source):
        return {name for name, recipe in RECIPES.items() if any(n.source == source for n in recipe.published)}

    assert len(rows("FastAP, Table 1")) == 4
    assert len(rows("FastAP, Table 2")) == len(rows("FastAP, Table 3")) == 3
    assert len(rows("FastAP, supplement, Table 2")) == 12
    assert len(rows("FastAP, supplement, Table 3")) == 9
    assert [len(rows(f"RaMBO, Table {table}")) for table in (2, 3, 4, 7)] == [2, 2, 2, 9]
    assert sum("recall-at-k" in name for name in rows("RS@k, Table 2")) == 24
    assert rows("RS@k, Table 3") == {"gldv1-recall-at-k", "gldv1-recall-at-k-simix", "gldv1-smooth-ap"}


@pytest.mark.parametrize("recipe", recipes_of(RetrievalRecipe).values(), ids=recipes_of(RetrievalRecipe))
def test_every_recipe_is_whole(recipe):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", recipe.name)
    assert recipe.what
    keys = [(n.source, n.split, n.metric) for n in recipe.published]
    assert len(set(keys)) == len(keys)
    assert all(n.value is None or 0 < n.value <= 100 for n in recipe.published)
    # R@k grows with k within a row of one table
    for source, split in {(n.source, n.split) for n in recipe.published}:
        row = [n for n in recipe.published if (n.source, n.split) == (source, split) and n.metric.startswith("R@")]
        assert [n.value for n in row] == sorted(n.value for n in row if n.value is not None) or row[0].value is None
    assert RetrievalRecipe(name=recipe.name).with_settings(recipe.settings()).settings() == recipe.settings()
    assert recipe.debug_version().loss == recipe.loss
    assert recipe.debug_version().sampler == recipe.sampler


@pytest.mark.parametrize("recipe", recipes_of(DetectionRecipe).values(), ids=recipes_of(DetectionRecipe))
def test_every_detection_recipe_is_whole(recipe):
    assert recipe.what
    assert DetectionRecipe(name=recipe.name).with_settings(recipe.settings()).settings() == recipe.settings()
    assert recipe.debug_version().loss == recipe.loss
    assert recipe.debug_version(has_data=False).data_set == "shapes"


def test_a_recipe_of_another_command_is_named():
    with pytest.raises(ValueError, match="voc07-r50-ce is a recipe of `rankgrad detect`: `rankgrad recipes` lists"):
        find("voc07-r50-ce")
    with pytest.raises(ValueError, match="there is no recipe 'voc07-r50-cf': did you mean 'voc07-r50-ce'"):
        find("voc07-r50-cf", DetectionRecipe)


def test_the_catalogue_loads_no_torchvision():
    code = "import sys, rankgrad.recipes.catalogue, rankgrad.recipes.studies; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torchvision", "timm", "PIL", "matplotlib"} & set(loaded)


def test_unverified_settings_say_so():
    for name, recipe in RECIPES.items():
        assert ("-rambo-log" in name) == any("unverified" in note for note in recipe.notes), name
        recalled = {setting for setting in recipe.settings() if recipe.source_of(setting) == "recalled"}
        assert ("-rambo-log" in name) == bool(recalled), name


def test_rows_of_papers_say_where_each_setting_is_from():
    for name, recipe in RECIPES.items():
        names = [setting for _, settings in recipe.sources for setting in settings]
        assert len(set(names)) == len(names), name
        assert set(names) <= set(recipe.settings()), name
        is_row = isinstance(recipe, RetrievalRecipe) and bool(recipe.published)
        assert not is_row or recipe.source_of("loss") in ("paper", "code"), name
        assert not is_row or recipe.source_of("lr") != "ours", name
    assert find("inshop-rambo-log").source_of("lam") == "recalled"
    assert find("inshop-rambo-log").source_of("crop") == "paper"
    changed = {name: find("cub-rambo-loglog").source_of(name) for name in ("batch_norm", "crop", "aspect", "pool", "lam", "lr")}
    assert changed == {**dict.fromkeys(changed, "ours"), "lr": "recalled"}
    assert find("cars-recall-at-k").source_of("milestones") == "code"
    assert find("own-images").source_of("lr") is None
    shown = describe_recipe(find("inshop-rambo-log"))
    assert re.search(r"^  setting +value +from +meaning$", shown, re.MULTILINE)
    assert re.search(r"^  lam +0\.2 +recalled ", shown, re.MULTILINE)
    assert not re.search(r"^  setting .* from ", describe_recipe(find("own-images")), re.MULTILINE)


def test_published_means_are_those_of_their_cells():
    for name in ("gldv1-recall-at-k", "gldv1-recall-at-k-simix", "gldv1-smooth-ap"):
        by_split = {(n.split, n.metric): n.value for n in RECIPES[name].published}
        cells = {split: value for split, value in by_split.items() if not split[0].startswith("mean")}
        assert len(cells) == 8
        # printed with one decimal
        assert by_split["mean", "mAP"] == pytest.approx(sum(cells.values()) / 8, abs=0.051)
        large = [value for (split, _), value in cells.items() if split.endswith("+r1m")]
        assert by_split["mean+r1m", "mAP"] == pytest.approx(sum(large) / 4, abs=0.051)


def test_the_list_has_an_entry_for_each_that_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")

    def listed(pattern: str = "") -> dict[str, str]:
        lines = list_recipes(RetrievalRecipe, pattern).splitlines()
        assert max(map(len, lines)) <= 110
        # the text of an entry continues on indented lines
        return {line.split()[0]: line for line in lines[1:] if not line.startswith(" ")}

    by_name = listed()
    assert list(by_name) == list(recipes_of(RetrievalRecipe))
    assert re.search(r" +R@1 82\.8 +RS@k, ResNet-50, batch 4,000 \(RS@k, Table", by_name["sop-recall-at-k"])
    assert "diverged" in by_name["sop-rambo-loglog-no-margin"]
    assert " R@1 78.6, 72.4 " in by_name["sop-rambo-loglog"]
    assert "(RaMBO, Table 2, with memory; RaMBO, Table 7, without memory)" in " ".join(
        list_recipes(RetrievalRecipe, "sop-rambo-loglog").split()
    )
    assert re.search(r" R@1 73\.2  ", by_name["sop-fastap-r18-m256"])  # in three tables
    assert set(listed("googlenet")) == {n for n in recipes_of(RetrievalRecipe) if "googlenet" in n}


def test_a_description_has_settings_numbers_and_notes():
    text = describe_recipe(find("cars-recall-at-k-simix"))
    assert re.search(r"^  batch_size +392 ", text, re.MULTILINE)
    assert re.search(r"^  ks +1,2,4,8,12,16,20,24,28,32 ", text, re.MULTILINE)
    assert re.search(r"^  R@1 +88\.2  test +RS@k, Table 2", text, re.MULTILINE)
    assert "--query-in-database" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sop-recal-at-k", "there is no recipe 'sop-recal-at-k': did you mean 'sop-recall-at-k'"),
        ("%%%", "there is no recipe '%%%': `rankgrad recipes` lists all"),
    ],
)
def test_an_unknown_recipe_gets_a_suggestion(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find(name)
