"""`python -m rankgrad.cli`."""

import sys

from rankgrad.cli import main

sys.exit(main())
