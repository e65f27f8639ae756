"""What tests of images and readers share."""

import shutil
from pathlib import Path

import fake_datasets
import pytest
from data.sample_images import picture, table_of
from PIL import Image


@pytest.fixture
def folder(tmp_path):
    """Six readable images of different shapes."""
    root = tmp_path / "images"
    root.mkdir()
    for i, (height, width) in enumerate([(40, 60), (60, 40), (50, 50), (32, 90), (33, 47), (64, 64)]):
        Image.fromarray(picture(height, width, i)).save(root / f"{i}.png")
    return table_of(root, [f"{i}.png" for i in range(6)])


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """One tree of each kind, not to be changed."""
    top = tmp_path_factory.mktemp("trees")
    return {name: fake_datasets.build(name, top / name) for name in fake_datasets.BUILDERS}


@pytest.fixture
def tree(built, tmp_path):
    """A tree to damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(built[name], tmp_path / name))

    return copy
