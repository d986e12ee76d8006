"""The comparison of two revisions: what it refuses, and how sure it says it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gate import interval

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gate.py"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nosuchrev"], "'nosuchrev' is no revision of this repository"),
        (["HEAD", "nosuchrev"], "'nosuchrev' is no revision of this repository"),
        (["HEAD", "--pairs", "0"], "0 is not in the range x>=1"),
        (["HEAD", "--processes", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message):
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_interval_is_one_of_processes_and_not_of_their_pairs():
    assert interval([[1.0, 1.0]] * 5) == (1.0, 1.0)
    assert interval([[0.9] * 50, [1.1] * 50]) == (0.9, 1.1)
