"""Puts what is checked and measured on a GPU within reach of its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
