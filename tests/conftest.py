"""What all tests share."""

import os

import pytest
import torch

# Read when a kernel is decorated, so it is set before any test can import one. On a GPU the same tests run compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A function from the name of a data set to the folder of a small fake copy of it, written once."""
    import fake_datasets

    root, built = tmp_path_factory.mktemp("trees"), {}

    def folder(name):
        if name not in built:
            place = root / name
            if name == "landmarks":
                for part in ("gldv1", "roxford5k", "rparis6k"):
                    fake_datasets.build(part, place / part)
            else:
                fake_datasets.build(name, place)
            built[name] = place
        return built[name]

    return folder


@pytest.fixture(scope="session", autouse=True)
def one_cache(tmp_path_factory):
    """Draw the glyphs once, and write nothing to the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
