"""16-bit training on a CPU that cannot do it is refused, not a process that ends without a word."""

import subprocess

import pytest
import torch

from rankgrad.train import cpu_precision
from rankgrad.train.cpu_precision import check_cpu_precision, trial_survives


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(cpu_precision.LIMIT, raising=False)
    trial_survives.cache_clear()
    yield
    trial_survives.cache_clear()


def announce(tmp_path, monkeypatch, flags, returncode):
    tried = []
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(cpu_precision, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **options: tried.append(args) or subprocess.CompletedProcess(args, returncode)
    )
    return tried


def test_a_matrix_unit_that_kills_is_refused_once_tried(tmp_path, monkeypatch):
    tried = announce(tmp_path, monkeypatch, "amx_bf16 amx_tile", -4)
    check_cpu_precision(torch.device("cpu"), "float32")
    check_cpu_precision(torch.device("cuda"), "bf16")
    assert not tried
    for _ in range(2):
        with pytest.raises(ValueError, match=r"precision 'bf16' ends the process .*ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"):
            check_cpu_precision(torch.device("cpu"), "bf16")
    assert len(tried) == 1


@pytest.mark.parametrize(("flags", "returncode", "trials"), [("amx_tile", 0, 1), ("amx_tile", 1, 1), ("avx512f", -4, 0)])
def test_other_machines_train(tmp_path, monkeypatch, flags, returncode, trials):
    tried = announce(tmp_path, monkeypatch, flags, returncode)
    check_cpu_precision(torch.device("cpu"), "bf16")
    assert len(tried) == trials


def test_a_limit_that_is_set_is_trusted(tmp_path, monkeypatch):
    tried = announce(tmp_path, monkeypatch, "amx_tile", -4)
    monkeypatch.setenv(cpu_precision.LIMIT, "AVX2")
    check_cpu_precision(torch.device("cpu"), "fp16")
    assert not tried
