"""What `octavo serve` does: runs one server in the foreground and tells the user about it.

Endpoints go to standard output, progress and logs to standard error. Knows terminals and signals;
leaves processes and files to `triton_server`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from octavo.local.greeting import greeting
from octavo.local.line_thread import ConsoleStream, ErrorConsole, LineThread, unbuffered
from octavo.local.server_log import LogRecord
from octavo.local.server_options import ServerOptions
from octavo.local.supervisor import LOAD_TIMEOUT_S, Signals, Supervisor
from octavo.local.triton_server import TritonServer
from octavo.restart_policy import RestartPolicy

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESTART_DELAY_S = 1.0


def serve(
    options: ServerOptions,
    level: int = logging.INFO,
    max_restarts: int = 5,
    probe: Callable[[str], str | None] | None = None,
) -> None:
    """Serve until a signal asks to stop; show log lines of `level` and above.

    A server that fails once it was ready is started again, `max_restarts` times in a row at most.
    `probe` asks the model at a gRPC address how it is, as `server_watch.Probe` says.

    Raises:
        ConfigError: a port is taken, or the machine lacks what the server needs.
        LaunchError: the server failed to start or load, or failed too often.
    """
    console = ErrorConsole(sys.stderr)
    log, endpoints = LineThread(ConsoleStream(console)), LineThread(unbuffered(sys.stdout))
    is_starting = True

    def show(record: LogRecord) -> None:
        # Why the first start failed is what the command ends with.
        is_told = is_starting and record.is_failed_load and level > logging.DEBUG
        if record.is_shown_at(level) and not is_told:
            log.put(str(record))

    events = _catch_signals()
    started = time.monotonic()
    server = TritonServer(options, on_log=show)
    try:
        server.start()
        if _wait_ready(server, console, log, events):
            is_starting = False
            endpoints.put(greeting(server, time.monotonic() - started))
            restarts = RestartPolicy(max_restarts, RESTART_DELAY_S)
            # Behind TLS the question would fail, and each try fill Triton's log with a handshake.
            ask = None
            if probe is not None and not server.options.is_encrypted:
                ask = partial(probe, server.grpc_url)
            Supervisor(server, restarts, events, server.say, ask).run()
        _stop(server, log)
    finally:
        server.kill()
        endpoints.close()
        log.close()


def _catch_signals() -> Signals:
    """Return the queue that signals which ask to stop go to from now on."""
    # Safe in signal handlers, unlike an Event.
    events: Signals = queue.SimpleQueue()

    def on_signal(number: int, _: FrameType | None) -> None:
        events.put(number)

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    return events


def _wait_ready(
    server: TritonServer, console: ErrorConsole, log: LineThread, events: Signals
) -> bool:
    what = "starting the server and loading the model"
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            progress = Progress(*columns, console=console, transient=True)
            stack.enter_context(progress).add_task(what, total=None)
        else:
            log.put(what)
        return server.wait_ready(LOAD_TIMEOUT_S, cancelled=lambda: not events.empty())


def _stop(server: TritonServer, log: LineThread) -> None:
    if server.poll() is not None:
        log.put("stopped")
        return
    is_cut_short = False

    def cut_short(*_: object) -> None:
        nonlocal is_cut_short
        is_cut_short = True
        server.cut_short()

    for number in STOP_SIGNALS:
        signal.signal(number, cut_short)
    # The model tells how long its running requests get.
    log.put("stopping; a second Ctrl-C ends everything at once")
    if server.stop():
        log.put("stopped")
    elif is_cut_short:
        log.put("stopped at once, as asked")
    else:
        log.put("stopped; Triton did not leave in time and was ended")
