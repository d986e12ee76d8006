"""NVIDIA's load tools, each in an environment of its own: they pin what Octavo does not.

These tests download a gigabyte, so that they are only collected where OCTAVO_TEST_TOOLS is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from octavo.local.bundle import find_wheel

collect_ignore_glob = [] if os.environ.get("OCTAVO_TEST_TOOLS") else ["test_*.py"]

PERF_ANALYZER = ("genai-perf==0.0.16", "tritonclient==2.51.0")
AIPERF = ("aiperf==0.13.0",)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "octavo" / "tools"
TIMEOUT_S = 300
#: Libraries that perf_analyzer wants, and the names under which Triton's wheel brings them.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

Run = Callable[..., str]


def installed(requirements: tuple[str, ...]) -> Path:
    """Return the folder of programs of an environment that has what is required."""
    name = "_".join([*requirements, f"py{sys.version_info.major}{sys.version_info.minor}"])
    folder = CACHE / name
    whole = folder / "installed"
    if not whole.exists():
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *requirements], check=True)
        whole.touch()
    return folder / "bin"


def run_tool(folder: Path, environment: Mapping[str, str], *command: object) -> str:
    """Run a program of a folder to its end and return what it printed; it must succeed."""
    program, *arguments = map(str, command)
    done = subprocess.run(
        [folder / program, *arguments],
        env={**environment, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def run_perf_analyzer(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs perf_analyzer or genai-perf, which calls it."""
    libraries = tmp_path_factory.mktemp("libraries")
    bundled = find_wheel().parents[1] / "nvidia_pytriton.libs"
    for name, pattern in LIBRARIES.items():
        (found,) = bundled.glob(pattern)
        (libraries / name).symlink_to(found)
    offline = dict.fromkeys(OFFLINE, "1")
    environment = {**os.environ, **offline, "LD_LIBRARY_PATH": str(libraries)}
    folder = installed(PERF_ANALYZER)
    return lambda *command: run_tool(folder, environment, *command)


@pytest.fixture(scope="session")
def run_aiperf() -> Run:
    """Return a function that runs aiperf, which takes no folder for a tokenizer when offline."""
    environment = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    folder = installed(AIPERF)
    return lambda *command: run_tool(folder, environment, "aiperf", *command)
