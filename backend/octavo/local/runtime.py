"""The private directory of one running server: made, locked, and swept when its owner died.

Its name is also the prefix of the server's shared-memory files. The lock is held by the
guardian, and by the launcher until the guardian runs, so it is free exactly when nobody looks after
the directory any more, whatever killed them. Knows nothing of
what lies inside.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from octavo.local.guardian import sweep

PREFIX = "octavo-triton-"
LOCK_NAME = "lock"


def make_runtime() -> tuple[Path, int]:
    """Make a locked runtime directory; return it and the descriptor that holds its lock."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Locked before it gets its name: a sweep in another launcher never sees it unlocked.
    unnamed = path / f"{LOCK_NAME}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(path / LOCK_NAME)
    return path, lock


def sweep_stale() -> None:
    """End and remove everything that launchers killed hard have left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}?*"):
        try:
            status = path.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue  # it would lead us to remove what its maker chose
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Another user's, or one being made or removed at this moment.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(path)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
