"""What `octavo watch` does: runs a Triton server as a container's command, and ends with it.

Container engines start a command that ended again, but not one that is only unhealthy. So this ends
a server that nothing but a new one can help, and leaves the rest to them. Needs no bundled server.
Knows nothing of ports or logs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import LaunchError
from octavo.local.guardian import prepare_server
from octavo.local.server_watch import CHECK_INTERVAL_S, Probe, ServerWatch

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_INTERVAL_S = 0.2
#: Idle stubs notice within four seconds that their server is gone, and remove its shared memory.
STUBS_TIMEOUT_S = 6.0
FAULT_STATUS = 1


def watch(command: Sequence[str], probe: Probe, check_interval_s: float = CHECK_INTERVAL_S) -> int:
    """Run a server until it ends or has a fault that it does not heal.

    Signals that ask to stop go to its whole process group, for the engine has to hear of them too.
    Returns its exit status (128 + n for signal n), or `FAULT_STATUS` after a fault.

    Raises:
        LaunchError: there is no such program.
    """
    try:
        server = subprocess.Popen(command, process_group=0, preexec_fn=prepare_server)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run: {error.strerror}") from None
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _signal_group(server.pid, number))
    watching = ServerWatch(server.pid, probe, check_interval_s)
    while (status := server.poll()) is None:
        if watching.fault is not None:
            _end(server)
            # Behind the end, for it may be that nobody reads it.
            with contextlib.suppress(OSError):
                print(f"octavo watch: {watching.fault}; the server is ended", file=sys.stderr)
            status = FAULT_STATUS
            break
        time.sleep(POLL_INTERVAL_S)
    watching.stop()
    _end_group(server.pid)
    return status if status >= 0 else 128 - status


def _end(server: subprocess.Popen[bytes]) -> None:
    """Kill a server, and remove the shared memory that a stub that is gone cannot remove."""
    files = re.findall(r" (/dev/shm/\S+)$", Path(f"/proc/{server.pid}/maps").read_text(), re.M)
    server.kill()
    server.wait()
    _end_group(server.pid)
    for file in set(files):
        Path(file).unlink(missing_ok=True)


def _end_group(group: int) -> None:
    """Give what is left of a server the time to clean up, then end it."""
    deadline = time.monotonic() + STUBS_TIMEOUT_S
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal, or none if it is 0, and return whether there is anybody to get it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False
