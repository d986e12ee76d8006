"""Finds a program that runs this Python; knows nothing of what it is to run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from octavo.errors import ConfigError


@functools.cache
def find_interpreter() -> Path:
    """Return a program that runs this Python, also where Python is embedded in another program.

    Raises:
        ConfigError: none of the usual places holds one of this version.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(sys.prefix, "bin")
    candidates = [folder / f"python{version}", folder / "python3", Path(sys.executable or "python")]
    for path in candidates:
        if _python_version(path) == version:
            return path
    raise ConfigError(
        f"no interpreter of Python {version} to run the engine process with; "
        f"tried {', '.join(str(path) for path in candidates)}"
    )


def _python_version(path: Path) -> str | None:
    # An embedding program may be its own `sys.executable`: it must not be run.
    if not path.name.startswith("python") or not os.access(path, os.X_OK):
        return None
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run(
        [path, "-I", "-c", program], stdout=subprocess.PIPE, text=True, timeout=30.0, check=False
    )
    return answer.stdout.strip()


def package_path() -> dict[str, str]:
    """Return the environment in which another interpreter finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
