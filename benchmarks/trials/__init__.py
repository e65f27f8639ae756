"""Trials of what a run must survive: processes killed at any moment, files from strangers, hours of work.

    python -m benchmarks.trials.kill --trials 50      SIGKILL at random points, resumed, compared
    python -m benchmarks.trials.kill --processes 2    the same of one rank of several
    python -m benchmarks.trials.fuzz --cases 1200     malformed lists, images, checkpoints, embeddings and settings
    python -m benchmarks.trials.soak --minutes 10     memory, file handles and threads of one long training

Run them in the root of the repository. Each has a fixed seed, prints what it did, and exits with 1 if anything was wrong.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# the small fake data sets of the tests, tests/fake_datasets.py, serve here too
sys.path.append(str(ROOT / "tests"))
