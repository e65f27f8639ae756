import os
import subprocess
import sys


def test_kernels_are_compiled_for_a_gpu_that_is_not_here(tmp_path):
    # a process of its own: here the kernels may be those of the interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.other_gpus"]
    options = ["--losses", "recall_at_k", "--only", "3090", "--kernels", "gather_kernel|normalize_kernel"]
    ended = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    title, _, *rows = ended.stdout.strip().splitlines()
    assert title == "RTX 3090, A10, A40: sm_86, 101,376 bytes of shared memory"
    assert [row.split()[0] for row in rows] == ["gather_kernel", "normalize_kernel"]
    assert all(row.split()[-1] == "yes" for row in rows)
