"""What all tests share."""

import importlib.util
import os

import pytest

# some virtual machines announce instructions for bfloat16 and do not execute them, which ends the process
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")

import torch

# Read when a kernel is decorated, so it is set before any test can import one. On a GPU the same tests run compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail browser tests that would be skipped where `.ci/run` has seen to it that there is a browser."""
    report = yield
    if os.environ.get("RANKGRAD_REQUIRE_BROWSER") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "Chromium" in reason or "playwright" in reason:
            report.outcome, report.longrepr = "failed", f"{reason}; RANKGRAD_REQUIRE_BROWSER is set, so this must run"
    return report


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
def large_blocks():
    """Triton's interpreter takes as long for a large block as for a small one."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
            from rankgrad.ops.triton import stored_scores

            patch.setattr(stored_scores, "GRADIENT_TILE", {"BM": 128, "BN": 128, "num_warps": 4})
        yield


@pytest.fixture
def ties_in_the_interpreter(monkeypatch):
    """Triton's interpreter sums products in float64: on some CPUs numpy's float32 sums depend on where in a tile a score is.

    Those of a GPU do not, so that equal embeddings have equal scores there.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder, a, b, d, *options):
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session", autouse=True)
def one_cache(tmp_path_factory):
    """Draw the glyphs once, and write nothing to the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
