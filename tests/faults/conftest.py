"""The trials are scripts of the repository, not part of the package: they are found from its root."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
