"""The files that the pages speak of: a folder of photographs, a run trained on them, and what is made from it."""

import shutil
from pathlib import Path

import fake_datasets
import pytest
from pages.command_lines import run

# of the classes that the pages name; the rest is as in other tests
CLASSES = ("abyssinian", "beagle", "birman", "boxer", "pug", "ragdoll")


@pytest.fixture(scope="session")
def shown_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/CLASS/image, cat.jpg, runs/pets, photos-embedded and the archives of data sets, made once."""
    folder = tmp_path_factory.mktemp("shown")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for label, name in enumerate(CLASSES):
            for example in range(6):
                fake_datasets.save(folder / "photos" / name / f"{example}.jpg", label, example, 0)
        shutil.copy(folder / "photos" / "birman" / "0.jpg", folder / "cat.jpg")
        run("rankgrad train --data photos --out runs/pets")
        run("rankgrad embed runs/pets photos --out photos-embedded")
    return folder


@pytest.fixture
def page_folder(shown_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy for the lines of one page, as the current folder."""
    import uvicorn

    folder = tmp_path / "here"
    shutil.copytree(shown_files, folder)
    monkeypatch.chdir(folder)
    # a command that serves would not return
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: [socket.close() for socket in sockets])
    return folder
