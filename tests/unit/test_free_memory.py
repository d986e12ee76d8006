"""Memory that was freed is no longer the process's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Pieces too small to be mapped one by one, with one in use behind them.
PROGRAM = """
import psutil
from octavo.free_memory import release_free_memory
pieces = [bytearray(2**16) for _ in range(1024)]
del pieces[:-1]
before = psutil.Process().memory_info().rss
release_free_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_what_is_free_below_something_in_use_goes_back_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert int(result.stdout) >= 60 * 2**20
