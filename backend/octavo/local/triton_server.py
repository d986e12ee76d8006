"""Starts, watches and stops one bundled Triton server that hosts Octavo's models.

    with TritonServer(ServerOptions(model="demo", http_port=0)) as server:
        server.wait_ready(timeout_s=60)
        ...

Leaving the block ends the server, its stubs and engine processes, and removes its shared memory and
its runtime directory; the guardian process does the same when this process is killed. Knows nothing
of engines, tensors or terminals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from octavo.errors import LaunchError
from octavo.local import bundle, guardian
from octavo.local.addresses import answers, reachable_address
from octavo.local.ports import claim_ports, hold_ports
from octavo.local.repository import check_repository
from octavo.local.runtime import make_runtime, sweep_stale
from octavo.local.server_command import engine_overrides, server_command
from octavo.local.server_log import LogRecord, own_record, parse_line, reason_in
from octavo.local.server_options import ServerOptions
from octavo.local.server_watch import ServerWatch
from octavo.local.startup import StartupProgress

POLL_INTERVAL_S = 0.05
START_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 45.0
NOTICE_INTERVAL_S = 15.0
KEPT_RECORDS = 1000
#: A guardian needs no longer to end everything, twice.
GUARDIAN_TIMEOUT_S = 2 * guardian.KILL_TIMEOUT_S


class TritonServer:
    """One server process tree; started once, stopped once."""

    def __init__(
        self, options: ServerOptions, on_log: Callable[[LogRecord], None] | None = None
    ) -> None:
        self.options = options
        self.pid = 0
        """Process id of `tritonserver` itself."""
        self.records: deque[LogRecord] = deque(maxlen=KEPT_RECORDS)
        """The newest lines of the log."""
        self._on_log = on_log
        self._progress = StartupProgress()
        self._ports = options.ports
        self._held_ports = contextlib.ExitStack()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._runtime: Path | None = None
        self._watch: ServerWatch | None = None

    @property
    def http_url(self) -> str:
        """Return the base URL of HTTP, as this machine reaches it."""
        return "http://" + self._address("http")

    @property
    def grpc_url(self) -> str:
        """Return host and port of gRPC, as this machine reaches it."""
        return self._address("grpc")

    @property
    def metrics_url(self) -> str:
        """Return the URL of the Prometheus metrics, as this machine reaches it."""
        return "http://" + self._address("metrics") + "/metrics"

    def _address(self, kind: str) -> str:
        return reachable_address(self.options.host, self._ports[kind])

    def start(self) -> None:
        """Start the server process.

        Raises:
            ConfigError: the repository or a port cannot be used, or the machine lacks something.
            LaunchError: the process did not start.
        """
        if self.options.repository is not None:
            check_repository(self.options.repository, self.options.control_mode == "none")
        self._ports = claim_ports(self.options.host, self._ports)
        self._held_ports = hold_ports(self.options.host, self._ports)
        sweep_stale()
        self._runtime, lock = make_runtime()
        try:
            self._launch(self._runtime, lock)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(lock)

    def _launch(self, runtime: Path, lock: int) -> None:
        bundle.write_backends(runtime / "backends")
        environment = bundle.server_environment({**os.environ, **self.options.environment})
        environment |= engine_overrides(self.options)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._guardian = subprocess.Popen(
                [
                    *(sys.executable, "-I", guardian.__file__, str(theirs.fileno())),
                    *(str(runtime), str(self.options.grace_s)),
                    *server_command(self.options, self._ports, runtime),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_log, name="octavo-log", daemon=True)
        self._reader.start()
        self._control.settimeout(START_TIMEOUT_S)
        self.pid = 0
        with contextlib.suppress(TimeoutError):
            self.pid = int(self._control.recv(64) or 0)
        if self.pid == 0:
            raise LaunchError(f"tritonserver did not start: {self.failure_reason()}")
        self._watch = ServerWatch(self.pid)

    def _read_log(self) -> None:
        assert self._guardian is not None
        assert self._guardian.stdout is not None
        with self._guardian.stdout as lines:
            for line in lines:
                record = parse_line(line.decode(errors="replace").rstrip("\n"))
                self.records.append(record)
                self._progress.observe(record, time.monotonic())
                if self._on_log is not None:
                    self._on_log(record)

    def wait_ready(
        self,
        timeout_s: float = 300.0,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        stall_s: float = STALL_TIMEOUT_S,
        notice_s: float = NOTICE_INTERVAL_S,
    ) -> bool:
        """Wait until every model can be used; return False if `cancelled` became true first.

        A server that is not ready `stall_s` after its models are is started once more, on the same
        ports, with a new `timeout_s`; every `notice_s` the log tells what is waited for.

        Raises:
            LaunchError: the server or a stub ended, it stalled twice, or took over `timeout_s`.
        """
        started = noticed = time.monotonic()
        may_restart = True
        while not self._is_ready():
            if cancelled():
                return False
            self._check_alive()
            now = time.monotonic()
            if now - started > timeout_s:
                raise LaunchError(f"the server is not ready after {timeout_s:g} s")
            if self._progress.stalled_s(now) > stall_s:
                self._restart_stalled(stall_s, may_restart)
                may_restart = False
                started = noticed = time.monotonic()
            elif now - noticed > notice_s:
                waited = f"still waiting for Triton after {now - started:.0f} s"
                self.say(logging.INFO, f"{waited}: {self._progress.describe()}")
                noticed = now
            time.sleep(POLL_INTERVAL_S)
        if self._watch is not None:
            self._watch.stop()
        return True

    def restart(self) -> None:
        """End whatever is left of the server, and start it again on the same ports.

        Raises as `start` does.
        """
        self.kill()
        self.records.clear()
        self._progress = StartupProgress()
        self.start()

    def _restart_stalled(self, stall_s: float, may_restart: bool) -> None:
        """End a server that has given up on its model, and start it again if it may."""
        self.kill()
        stall = f"Triton was not ready {stall_s:g} s after its model was"
        if not may_restart:
            raise LaunchError(
                f"{stall}, twice; the machine is too busy for Triton's health check of 1 s: "
                "stop other work or allow more CPU cores, then start again"
            )
        self.say(logging.WARNING, f"{stall} (a busy machine can do that); starting it once more")
        self.restart()

    def say(self, level: int, message: str) -> None:
        """Put a line of the launcher's own into what `on_log` is told."""
        if self._on_log is not None:
            self._on_log(own_record(level, message))

    def _is_ready(self) -> bool:
        urls = [f"{self.http_url}/v2/health/ready"]
        # The metrics' port opens last; a flag may have turned it off.
        if not any(flag.startswith("--allow-metrics") for flag in self.options.flags):
            urls.append(self.metrics_url)
        return all(answers(url, self.options.http_keys) for url in urls)

    def poll(self) -> int | None:
        """Return the server's exit status once it has ended and all is cleaned up, else None."""
        return None if self._guardian is None else self._guardian.poll()

    def stop(self) -> bool:
        """Let running requests finish for `grace_s` at most, then end everything.

        Returns: whether the server left by itself; False if it had to be killed.
        """
        if self._guardian is None or self._control is None:
            return True
        with contextlib.suppress(OSError):
            self._control.sendall(b"stop")
        status = self._end_of_guardian(self.options.grace_s + GUARDIAN_TIMEOUT_S)
        self.kill()
        return status in (0, 128 + signal.SIGTERM)

    def cut_short(self) -> None:
        """End the grace period of a `stop` in progress; safe to call in a signal handler."""
        if self._control is not None:
            # Closing alone would leave the guardian's end open while `stop` still uses ours.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End everything at once and remove every file; harmless when the server has ended."""
        if self._control is not None:
            self._control.close()
        if self._watch is not None:
            self._watch.stop()
        if self._guardian is not None:
            self._end_of_guardian(GUARDIAN_TIMEOUT_S)
        # Only a guardian that was itself killed leaves anything here.
        if self._runtime is not None and self._runtime.exists():
            guardian.sweep(self._runtime)
        if self._reader is not None:
            self._reader.join(timeout=guardian.KILL_TIMEOUT_S)
        self._held_ports.close()

    def _end_of_guardian(self, timeout_s: float) -> int:
        """Wait for the guardian; if it is late, for it is frozen, end it and so its server."""
        assert self._guardian is not None
        try:
            return self._guardian.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            return self._guardian.wait()

    def failure_reason(self) -> str:
        """Return the last errors of the log, or its last line."""
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        return reason_in(self.records)

    def _check_alive(self) -> None:
        """Raise LaunchError if what is started has ended or will never be ready."""
        if (status := self.poll()) is not None:
            raise LaunchError(self._why_it_ended(status))
        # Triton itself ends only when its other models are loaded too.
        if self._progress.has_failed and self.options.ends_at_failed_load:
            self.kill()
            raise LaunchError(self.failure_reason())
        # Triton waits for ever for a stub that was killed while it loaded.
        if self._watch is not None and self._watch.fault is not None:
            self.kill()
            raise LaunchError(self._watch.fault)

    def _why_it_ended(self, status: int) -> str:
        reason = self.failure_reason()
        how = "" if self._progress.has_failed else f"{guardian.describe_exit(status)}: "
        return how + reason

    def __enter__(self) -> Self:
        """Start the server."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()
