"""Stands between the launcher and a Triton server, so that nothing of it outlives the launcher.

`octavo.local.triton_server` runs this file as a script: it imports the standard library alone,
starts in milliseconds, and keeps working when the launcher is killed. It knows nothing of models,
ports or logs. Everything it starts carries the runtime directory's name in its environment, which
is how the server's own children (stubs, engine processes) are found again, whatever session they
moved to.

Arguments: control socket's descriptor, runtime directory, grace period in seconds, command.
Over the socket it sends the server's process id in one line; `stop` asks it for a clean end, and a
closed socket (the launcher is gone) for an end at once. Its exit status is the server's; 128 + n
says that signal n ended the server, and a negative one that a signal ended the guardian.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

MARKER = "OCTAVO_RUNTIME"
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
KILL_TIMEOUT_S = 5.0
# Triton needs a moment after its own exit timeout to say so in the log.
GRACE_MARGIN_S = 0.5
# Triton 2.51 reads an HTTP body into the stack of a thread, twice: with the usual 8 MiB it is
# killed by one of 4.2 MB. NVIDIA starts its images with 64 MiB.
STACK_BYTES = 64 << 20


def processes_of(name: str) -> list[int]:
    """Return the ids of live processes started on behalf of the runtime directory `name`."""
    mark = f"{MARKER}={name}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def sweep(runtime: Path) -> None:
    """Kill what still runs on behalf of `runtime`, then remove it and its shared memory."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := processes_of(runtime.name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for file in SHARED_MEMORY.glob(f"{runtime.name}*"):
        file.unlink(missing_ok=True)
    shutil.rmtree(runtime, ignore_errors=True)


def watch(server: subprocess.Popen[bytes], control: socket.socket, grace_s: float) -> int:
    """Wait for the server's end, by itself or as the launcher asks.

    Returns: the server's exit status, negative for a signal.
    """
    wake, wake_writer = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_writer, False)
    stop_signals: list[int] = []
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    deadline = None
    while server.poll() is None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([control.fileno(), wake], [], [], timeout)
        asked = control.fileno() in ready
        if deadline is not None and time.monotonic() >= deadline:
            server.kill()
            return server.wait()
        if wake in ready:
            os.read(wake, 512)
        if asked and not control.recv(64):
            server.kill()
            return server.wait()
        if deadline is None and (asked or stop_signals):
            # The whole group: an engine process that hears of it ends what runs too long.
            os.killpg(server.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s + GRACE_MARGIN_S
    return server.returncode


def describe_exit(status: int) -> str:
    """Return in words how a server ended whose guardian has this exit status."""
    if status < 0:
        return f"the server's guardian was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"the server was killed by {signal.Signals(status - 128).name}"
    return f"the server ended with exit status {status}"


def prepare_server() -> None:
    """Let the process die with its parent, and its threads have stacks of `STACK_BYTES`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    # Without a limit threads get 2 MiB.
    if soft == resource.RLIM_INFINITY or soft < most:
        resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


def main(arguments: list[str]) -> int:
    """Run the server named by the script's arguments, and return its exit status."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    runtime, grace_s, command = Path(arguments[1]), float(arguments[2]), arguments[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARKER: runtime.name},
            start_new_session=True,
            preexec_fn=prepare_server,
        )
        with contextlib.suppress(OSError):
            control.sendall(f"{server.pid}\n".encode())
        status = watch(server, control, grace_s)
    finally:
        sweep(runtime)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
