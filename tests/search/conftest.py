"""A tiny trained run, its embeddings and an index, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_datasets import build

from rankgrad.recipes.catalogue import find
from rankgrad.runs.pipeline import start_run
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.search import Gallery, Searcher, TrainedModel, build_index, embed_images, folder_of_images, load


@pytest.fixture(scope="session", autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests write is signed with a key of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("folder", tmp_path_factory.mktemp("data"), classes=5, per_class=6)


@pytest.fixture(scope="session")
def run_folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    task = RetrievalTask(find("own-images").debug_version(), RunContext(data, torch.device("cpu")))
    start_run(task, RunFolder(folder), debug=True)
    return folder


@pytest.fixture(scope="session")
def trained(run_folder: Path) -> TrainedModel:
    return load(run_folder, "cpu")


@pytest.fixture(scope="session")
def gallery(trained: TrainedModel, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """The 30 test images."""
    folder = tmp_path_factory.mktemp("embedded") / "gallery"
    return embed_images(trained, folder_of_images(data / "test"), folder, shown=False)


@pytest.fixture(scope="session")
def searcher(gallery: Gallery) -> Searcher:
    build_index(gallery, gallery.folder, shown=False)
    return Searcher.open(gallery.folder)
