"""Finds stub processes that have ended while their server lives on.

Triton's python backend neither replaces such a stub nor says that it has gone, and goes on refusing
the model's requests. Knows nothing of models or logs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# The kernel keeps 15 characters of triton_python_backend_stub.
STUB_COMMAND = "triton_python_backend_stub"[:15]


def dead_stubs(server_pid: int) -> set[int]:
    """Return the ids of the server's stubs that have ended and that it has not collected yet.

    One may be listed for a moment while Triton unloads its model.
    """
    dead = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        # Processes end meanwhile.
        with contextlib.suppress(OSError):
            head, _, tail = file.read_text(errors="replace").rpartition(")")
            state, parent = tail.split()[:2]
            if (state, int(parent)) == ("Z", server_pid) and head.endswith(f"({STUB_COMMAND}"):
                dead.add(int(file.parent.name))
    return dead
