"""Puts the comparison with other engines within reach of its tests."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def own_pid():
    """A process that can be weighed."""
    return os.getpid()
