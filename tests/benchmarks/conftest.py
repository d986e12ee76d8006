"""Puts the scripts that measure within reach of their tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# Those that are run by their path import what lies beside them.
sys.path.append(str(ROOT / "benchmarks"))
