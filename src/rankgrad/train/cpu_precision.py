"""16-bit training on a CPU: whether the machine survives it.

A virtual machine may announce a matrix unit (AMX) that its kernel does not let programs use. oneDNN then ends the process with
an illegal instruction, without a word, so it is tried in another process first.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"
# large enough for oneDNN to choose the matrix unit
TRIAL = """
import torch
layers = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 64))
layers = layers.to(memory_format=torch.channels_last)
with torch.autocast("cpu", dtype=torch.bfloat16):
    value = layers(torch.zeros(64, 16, 32, 32).to(memory_format=torch.channels_last))
value.float().sum().backward()
"""


def check_cpu_precision(device: torch.device, precision: str) -> None:
    """Refuse a precision of 16 bits with which this machine's CPU would end the process."""
    if device.type == "cpu" and precision != "float32" and not trial_survives():
        raise ValueError(
            f"fit: precision {precision!r} ends the process on this CPU, whose matrix unit (AMX) cannot be used: set the "
            f"environment variable {LIMIT}=AVX512_CORE_FP16 before it starts, or train in 'float32'"
        )


@functools.cache
def trial_survives() -> bool:
    """Whether a convolution in bf16 and its gradient leave a process alive; tried only where they may not."""
    if LIMIT in os.environ or not CPU_INFO.is_file() or "amx_tile" not in CPU_INFO.read_text(encoding="utf-8"):
        return True
    done = subprocess.run([sys.executable, "-c", TRIAL], check=False, capture_output=True)
    # killed by a signal; any other failure will say itself what it is
    return done.returncode >= 0
