"""Triton compiles the kernels of every ranker: its interpreter runs much that its compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# in a process of its own, since the kernels of this one may be those of the interpreter
COMPILE = """
import torch
import rankgrad as rg
from rankgrad._gpu import Gpu
from rankgrad.ops.triton.absent_gpu import compiled_for

gpu = Gpu.named("h100", caller="")
rankers = [rg.Sigmoid(0.01), rg.UpperBound(), rg.Blackbox(2.0), rg.Histogram(10)]
losses = [rg.RankLoss(ranker, rg.AveragePrecision(), precision="high") for ranker in rankers] + [rg.RecallAtKLoss()]

def call():
    for loss in losses:
        for per_class in (4, 64):  # few thresholds of a query, and many
            loss(torch.randn(256, 64, requires_grad=True), torch.arange(256) // per_class)
        pairs = rg.Pairs(torch.arange(64), torch.arange(64) * 3)
        loss(torch.randn(64, 64, requires_grad=True), None, torch.randn(256, 64, requires_grad=True), relevance=pairs)

for kernel in compiled_for(gpu, call):
    print(kernel.metadata.name, kernel.metadata.shared <= gpu.shared_memory)
"""


def test_kernels_compile_and_fit(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert {"count_kernel", "backward_kernel", "scatter_kernel", "gradient_kernel", "recall_kernel"} <= {
        name for name, _ in lines
    }
    assert [name for name, fits in lines if fits != "True"] == []
