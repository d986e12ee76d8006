"""Keeps other users of the machine from reading requests where Triton passes them to the model.

Triton's Python backend makes its shared memory readable for everybody. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"

logger = logging.getLogger(__name__)


def mapped_files(maps: Iterable[str], folder: str = SHARED_MEMORY) -> list[Path]:
    """Return the files of a folder that lines of `/proc/PID/maps` name, each once."""
    names = (line.rstrip("\n").split(maxsplit=5)[5:] for line in maps)
    paths = {path for found in names for path in found if path.startswith(folder)}
    return [Path(path) for path in sorted(paths) if not path.endswith(" (deleted)")]


def keep_private(files: Iterable[Path]) -> None:
    """Leave files to their owner; one that cannot be changed is logged."""
    for path in files:
        try:
            os.chmod(path, 0o600)
        except OSError as error:
            logger.warning("shared memory %s stays readable for other users: %s", path, error)


def keep_own_shared_memory_private() -> None:
    """Do so with all shared memory of this process; call before a request passes through it."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        keep_private(mapped_files(maps))
