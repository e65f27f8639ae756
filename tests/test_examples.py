"""Every example runs as it stands in its own process, on tiny data."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# arguments that make it short, what its output must hold, and the packages it needs beyond ours
RUNS = {
    "accelerate_loop": (["--epochs", "1", "--cpu"], "epoch 1: loss of the global batch ", ("accelerate",)),
    "cross_modal": (["--steps", "5"], "text to image: R@1 ", ()),
    "detector": (["--steps", "5"], "step 5: loss_classifier ", ("torchvision",)),
    "distributed": (["--steps", "10"], "step 10: loss of the global batch ", ()),
    "learning_to_rank": (["--queries", "100", "--epochs", "3"], "network on ApproxNDCG: NDCG@10 ", ()),
    "lightning_module": (["--epochs", "1"], "'val_mAP': ", ("lightning",)),
    "metric_learning": (["--steps", "3"], "Smooth-AP, mined pairs: test mAP ", ("pytorch_metric_learning",)),
    "multi_label": (["--steps", "3"], "step 3: test NDCG ", ()),
    "own_dataset": (["--epochs", "1", "--batch-size", "960"], "finished after ", ("matplotlib", "safetensors")),
    "own_images": (["--epochs", "1"], "after:  test R@1 ", ("timm", "torchvision")),
    "own_loop": (["--epochs", "1", "--batch-size", "960"], "epoch 1: loss ", ("matplotlib",)),
    "sentence_encoder": (["--epochs", "1"], "after:  mAP ", ("sentence_transformers", "datasets")),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name, tmp_path):
    arguments, expected, packages = RUNS[name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    launcher = TORCHRUN if name in ("accelerate_loop", "distributed") else ()
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout


def test_every_example_is_run_and_short():
    files = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(RUNS)
    assert max(files.values()) < 80
