"""Kernels compiled for a GPU that is not there, into Triton's cache."""

import os
import subprocess
import sys

import pytest
import torch

import rankgrad as rg
from rankgrad._gpu import Gpu, as_if_on, gpu_of, has_gpu

CPU = torch.device("cpu")

# in a process of its own, since the kernels of this one may be those of the interpreter
COMPILE = """
import sys, torch, triton
import rankgrad as rg

found, seen = [], []
triton.knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: found.append(
    (metadata["name"], metadata["target"], cache_hit)
)

def objective(ranks):
    seen.append(ranks)
    return ranks.mean(1 / ranks.rank)

loss = rg.RankLoss(rg.Histogram(5), objective)
embeddings, labels = torch.randn(64, 8, requires_grad=True), torch.arange(64) // 4
before = loss(embeddings, labels)
number = rg.compile_kernels(lambda: loss(embeddings, labels), sys.argv[1])
assert len(seen) == 1, "the objective does not see what was not computed"
assert loss(embeddings, labels) == before, "afterwards a CPU is a CPU"
print(number, len(found), sum(hit for *_, hit in found))
print(*sorted({name for name, *_ in found}))
print(*{target.arch for _, target, _ in found})
"""


def compiled(cache, gpu):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, gpu]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**environment, "TRITON_CACHE_DIR": str(cache)}
    )
    assert ended.returncode == 0, ended.stderr
    counts, names, architectures = ended.stdout.splitlines()
    return tuple(map(int, counts.split())), set(names.split()), architectures


def test_a_later_process_finds_the_kernels_of_both_passes_and_of_captured_calls(tmp_path):
    pytest.importorskip("triton.knobs", reason="this Triton does not say what it compiles")
    (number, compiles, hits), names, architecture = compiled(tmp_path, "h100")
    assert (compiles, hits) == (number, 0)
    assert {"count_kernel", "backward_kernel", "gather_kernel", "class_kernel"} <= names
    assert architecture == "90"
    assert compiled(tmp_path, "9.0")[0] == (number, number, number)


@pytest.mark.parametrize(("name", "capability"), [("H100", (9, 0)), ("a100", (8, 0)), ("sm_89", (8, 9)), (" 12.0", (12, 0))])
def test_a_gpu_has_a_name_or_a_number(name, capability):
    assert Gpu.named(name, caller="").capability == capability


def test_a_thread_takes_its_cpu_for_a_gpu():
    assert gpu_of(CPU) is None
    gpu = Gpu.named("a100", caller="")
    with as_if_on(gpu):
        assert gpu_of(CPU) == gpu
        assert has_gpu(CPU)
    assert not has_gpu(CPU)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match=r"compile_kernels: there is no GPU 'h101' in the list: did you mean 'h100'\?"):
        rg.compile_kernels(lambda: None, "h101")


def test_the_interpreter_compiles_nothing(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 is set"):
        rg.compile_kernels(lambda: None, "h100")
