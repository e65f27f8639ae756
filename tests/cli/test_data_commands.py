"""`rankgrad check-data`: what it prints, and which images it refuses."""

import fake_datasets
import pytest
from PIL import Image

from rankgrad import cli
from rankgrad.cli.data_commands import describe
from rankgrad.data.readers import find_reader, read


@pytest.fixture
def tree(tmp_path):
    return lambda name: fake_datasets.build(name, tmp_path / name)


def description(name, root, **settings):
    return describe(find_reader(name), read(name, root, **settings))


def test_check_data_prints_a_table(tree):
    root = tree("inshop")
    (root / "img/WOMEN/Dresses/id_00000003/02_1_front.jpg").unlink()
    lines = description("inshop", root, partial=True).splitlines()
    assert lines[:2] == ["inshop: In-Shop Clothes Retrieval (DeepFashion)", f"in {root}"]
    assert lines[3:6] == [
        "split  images  classes  categories  queries  gallery  smallest  median  largest  protocol",
        "train      29        6           3        -        -         4       5        5  -",
        "test       30        6           3       18       12         5       5        5  query-gallery",
    ]
    text = "\n".join(lines)
    assert "expected train: 25,882 images of 3,997 classes: differs" in text
    assert "note: left out 1 of 60 listed images, which do not exist:\n  " in text


def test_check_data_leaves_out_what_no_split_has(tree):
    text = description("folder", tree("folder"))
    assert "split  images  classes  smallest  median  largest  protocol\n" in text
    assert "expected: no published sizes" in text
    roxford = description("roxford5k", tree("roxford5k"), partial=True)
    assert "split        images  queries  gallery  protocol\n" in roxford
    assert "smallest" not in roxford


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_check_data_decodes_every_image(tree, capsys):
    root = tree("folder")
    assert cli.main(["check-data", "folder", str(root)]) == 0
    images = sum(len(table) for table in read("folder", root).splits.values())
    assert f"decoded {images} images in" in capsys.readouterr().out
    damaged = sorted(path for path in root.rglob("*.png") if "test" in path.parts)[3]
    cut(damaged)
    assert cli.main(["check-data", "folder", str(root)]) == 2
    said = capsys.readouterr().err
    assert f"1 of {images} images cannot be read:\n  {damaged} cannot be read:" in said
    assert "--skip-bad" in said
    assert cli.main(["check-data", "folder", str(root), "--no-decode"]) == 0
    assert "decoded" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.webp", "a.bmp", "a.tif"])
def test_check_data_finds_what_training_stops_on(tmp_path, name, capsys):
    for label in ("x", "y"):
        (tmp_path / label).mkdir()
        Image.effect_noise((90, 60), 60).save(tmp_path / label / name)
    assert cli.main(["check-data", "folder", str(tmp_path), "--workers", "1"]) == 0
    cut(tmp_path / "x" / name)
    assert cli.main(["check-data", "folder", str(tmp_path)]) == 2
    assert f"x/{name} cannot be read" in capsys.readouterr().err


def test_an_error_does_not_drive_the_terminal(tmp_path, capsys):
    assert cli.main(["check-data", "folder", str(tmp_path / "\x1b[2Jnowhere")]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\\x1b[2Jnowhere does not exist" in said
