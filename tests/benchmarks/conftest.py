"""Puts the scripts that measure within reach of their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
