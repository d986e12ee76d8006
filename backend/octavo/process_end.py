"""Says how a child process ended; knows nothing of what it was for."""

from __future__ import annotations

import signal
import subprocess

#: A closed connection is seen a little before the exit status of its process.
_EXIT_STATUS_TIMEOUT_S = 2.0


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """Say by which signal or with which exit status a process ended that closed its connection."""
    try:
        status = process.wait(_EXIT_STATUS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if status < 0:
        return f"died (signal {-status}, {signal.Signals(-status).name})"
    return f"ended (exit status {status})"
