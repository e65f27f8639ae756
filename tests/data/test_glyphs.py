"""The built-in data set: its sizes, its purity, its cache."""

import dataclasses
import os
import stat
import unicodedata

import numpy as np
import pytest

from rankgrad.data import glyphs as module
from rankgrad.data.glyphs import Glyphs, load_glyphs


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("glyphs")


@pytest.fixture(scope="module")
def splits(cache):
    return {split: load_glyphs(split, cache=cache) for split in module.SPLITS}


def equal(a: Glyphs, b: Glyphs) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_each_split_has_a_thousand_classes_of_eight_drawings(splits):
    for data in splits.values():
        assert len(data.class_names) >= 1000
        assert data.images.dtype == np.uint8
        assert data.images.shape == (8 * len(data.class_names), 32, 32)
        assert data.labels.dtype == data.categories.dtype == np.int64
        assert np.array_equal(np.bincount(data.labels), np.full(len(data.class_names), 8))


def test_no_character_is_in_both_splits_whatever_the_seed(splits, cache):
    train = set(splits["train"].class_names)
    assert not train & set(splits["test"].class_names)
    assert load_glyphs("test", seed=5, examples=1, size=16, cache=cache).class_names == splits["test"].class_names


def test_a_category_is_a_script_shared_by_both_splits(splits):
    for script, name in (("Greek", "GREEK"), ("Cyrillic", "CYRILLIC"), ("Georgian", "GEORGIAN"), ("Lao", "LAO")):
        for data in splits.values():
            of_script = np.unique(data.labels[data.categories == data.category_names.index(script)])
            assert len(of_script) >= 10
            assert all(unicodedata.name(data.class_names[c]).startswith(name) for c in of_script)


def test_characters_that_look_the_same_are_one_class(splits):
    names = {char for data in splits.values() for char in data.class_names}
    for group in (
        ("LATIN CAPITAL LETTER A", "GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"),
        ("LATIN SMALL LETTER O", "GREEK SMALL LETTER OMICRON", "CYRILLIC SMALL LETTER O"),
        ("LATIN CAPITAL LETTER A WITH RING ABOVE", "ANGSTROM SIGN"),
        ("GREEK SMALL LETTER MU", "MICRO SIGN"),
    ):
        assert len(names & {unicodedata.lookup(name) for name in group}) == 1, group
    # small differences stay: an accent, the case
    assert names >= set("oOöÖnñ")


def test_every_drawing_has_ink_and_no_two_are_equal(splits):
    images = splits["test"].images.reshape(len(splits["test"].images), -1)
    assert images.std(axis=1).min() > 5
    assert len(np.unique(images, axis=0)) == len(images)


def test_pixels_alone_do_not_solve_it(splits):
    data = splits["test"]
    pixels = data.images.reshape(len(data.images), -1).astype(np.float32)
    pixels -= pixels.mean(axis=1, keepdims=True)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    queries = np.random.default_rng(0).choice(len(pixels), 500, replace=False)
    scores = pixels[queries] @ pixels.T
    scores[np.arange(500), queries] = -np.inf
    found = (data.labels[scores.argmax(axis=1)] == data.labels[queries]).mean()
    # chance is 0.0007: the drawings of a class have much in common, and not enough
    assert 0.05 < found < 0.5


def test_is_a_pure_function_of_its_arguments(splits, tmp_path):
    assert equal(load_glyphs("test", cache=tmp_path), splits["test"])
    other = load_glyphs("test", seed=1, cache=tmp_path)
    assert other.class_names == splits["test"].class_names
    assert not np.array_equal(other.images, splits["test"].images)


def test_more_examples_than_fonts_are_drawn_anew(cache):
    data = load_glyphs("test", size=16, examples=20, cache=cache)
    one_class = data.images[data.labels == 0].reshape(20, -1)
    assert len(np.unique(one_class, axis=0)) == 20


def test_a_second_call_reads_the_file(splits, cache, monkeypatch):
    monkeypatch.setattr(module, "_draw", None)
    assert equal(load_glyphs("test", cache=cache), splits["test"])


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKGRAD_CACHE", str(tmp_path / "elsewhere"))
    load_glyphs("test", size=16, examples=1)
    assert [path.suffix for path in (tmp_path / "elsewhere").iterdir()] == [".npz"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_cache_file_is_rebuilt(tmp_path, damage):
    drawn = load_glyphs("test", size=16, examples=1, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    path.write_bytes({"cut": good[: len(good) // 2], "flipped": bytes(flipped), "empty": b"", "foreign": b"hello"}[damage])
    assert equal(load_glyphs("test", size=16, examples=1, cache=tmp_path), drawn)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_cache_has_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        load_glyphs("test", size=16, examples=1, cache=tmp_path / "cache")
    finally:
        os.umask(before)
    (path,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_an_unwritable_cache_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="glyphs are not cached"):
        data = load_glyphs("test", size=16, examples=1, cache=tmp_path / "file")
    assert len(data.images) >= 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "val"}, r"split must be one of \('train', 'test'\), got 'val'"),
        ({"size": 8}, "size must be at least 16, got 8"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
    ],
)
def test_says_what_is_wrong_with_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_glyphs(**{"split": "train", **arguments})


def test_says_which_extra_is_missing(monkeypatch):
    module._font_paths.cache_clear()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "PIL" else name)
    with pytest.raises(ModuleNotFoundError, match=r"missing: PIL.*pip install 'rankgrad\[glyphs\]'"):
        module._font_paths()


def test_glyphs_check_themselves(splits):
    data = splits["test"]
    with pytest.raises(ValueError, match="labels must lie in"):
        dataclasses.replace(data, class_names=data.class_names[:-1])
    with pytest.raises(ValueError, match="got lengths"):
        dataclasses.replace(data, labels=data.labels[:-1])
