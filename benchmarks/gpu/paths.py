"""Where this checkout's packages lie, for machines on which none of them is installed."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def search_path() -> str:
    """Return the PYTHONPATH of a process that imports what this one can."""
    own = [str(ROOT / folder) for folder in ("benchmarks", "kernels", "backend")]
    return os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
