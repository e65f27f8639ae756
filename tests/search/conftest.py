"""A tiny trained run, its embeddings and an index, made once."""

from pathlib import Path

import pytest
import torch
from fake_datasets import build

from rankgrad.recipes.catalogue import find
from rankgrad.runs.pipeline import start_run
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.search import Gallery, Network, Searcher, build_index, embed_images, folder_of_images, open_run


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
def network(run_folder: Path) -> Network:
    return open_run(run_folder)


@pytest.fixture(scope="session")
def gallery(network: Network, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """The 30 test images."""
    folder = tmp_path_factory.mktemp("embedded") / "gallery"
    return embed_images(network, folder_of_images(data / "test"), folder, shown=False)


@pytest.fixture(scope="session")
def searcher(gallery: Gallery) -> Searcher:
    build_index(gallery, gallery.folder, shown=False)
    return Searcher.open(gallery.folder)
