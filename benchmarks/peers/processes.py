"""Processes of the peers: started in a group of their own, weighed, and ended with all they began.

Knows no peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.environment import last_lines
from benchmarks.peers.side import Unavailable

START_TIMEOUT_S = 900.0
"""A first start may compile the model."""
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.2


class Process:
    """One process group whose output goes to a log."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], *, pipes: bool
    ) -> None:
        self.log = log
        stream = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                # Whatever ends this process ends the peer, even one that is paused.
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=stream,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,
            )

    def failure(self) -> Unavailable:
        """Return an exception that tells the end of the log."""
        status = self.popen.poll()
        state = "still runs" if status is None else f"ended with status {status}"
        return Unavailable(f"the process {state}: {last_lines(self.log)}; see {self.log}")

    def pause(self) -> None:
        """Stop the group where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group go on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the group: kindly, then by force."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


class Server(Process):
    """A process that answers HTTP on a port of this machine."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(command, log, environment, pipes=False)
        self.port = port

    def wait_ready(self, path: str) -> None:
        """Wait until `path` answers with success.

        Raises:
            Unavailable: the process ended, or gave no such answer within `START_TIMEOUT_S`.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.popen.poll() is not None:
                raise self.failure()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5).close()
                return
            time.sleep(_POLL_S)
        raise self.failure()


class Worker(Process):
    """A process that answers each JSON line with one."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(command, log, environment, pipes=True)

    def ask(self, message: Any) -> Any:
        """Send a message and wait for the answer.

        Raises:
            Unavailable: the process ended, or answered nonsense.
        """
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        try:
            print(json.dumps(message), file=self.popen.stdin, flush=True)
            return json.loads(self.popen.stdout.readline())
        except (OSError, ValueError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
            raise self.failure() from error


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def resident_bytes(root: int) -> int:
    """Return the memory of a process tree: what is shared counts in parts (PSS)."""
    process = psutil.Process(root)
    return sum(_pss_bytes(each.pid) for each in [process, *process.children(recursive=True)])


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
