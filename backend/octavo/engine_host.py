"""Where an engine runs: in a process of its own, or in a thread of this one.

A host starts `run_engine`, holds the connection to it, and knows how it ended. Knows nothing of
requests or restarts.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from octavo.config import EngineConfig
from octavo.engine_process import EngineFactory, load_engine, run_engine
from octavo.interpreter import find_interpreter, package_path
from octavo.process_end import describe_end

#: One that hangs in a device's driver does not even end when it is killed.
_KILL_TIMEOUT_S = 10.0

TUNABLES = "GLIBC_TUNABLES"
#: https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
HUGE_PAGES = (
    "glibc.malloc.hugetlb=1",
    # What is mapped by itself rarely begins where a huge page does, so weights go on the heap; and
    # the heap's end is not given back after every step. glibc's own thresholds rise up to these,
    # sooner or later, with what happens to be freed.
    f"glibc.malloc.mmap_threshold={32 << 20}",
    f"glibc.malloc.trim_threshold={64 << 20}",
)

logger = logging.getLogger(__name__)


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose process asks the kernel for huge pages for what it allocates.

    Weights and KV blocks are read whole, over and over: with small pages a part of the time goes
    into finding them. A setting of the user's own stays; C libraries other than glibc ignore it.
    """
    set_already = environment.get(TUNABLES, "")
    chosen = {each.partition("=")[0] for each in set_already.split(":")}
    added = [each for each in HUGE_PAGES if each.partition("=")[0] not in chosen]
    return {**environment, TUNABLES: ":".join(filter(None, (set_already, *added)))}


class EngineHost(Protocol):
    """A started engine and the owner's end of the connection to it."""

    connection: Connection

    def describe_end(self) -> str:
        """Say in words how the engine ended; call when the connection is at its end."""

    def stop(self, timeout_s: float) -> None:
        """Wait for the engine to end, and make it end after `timeout_s`."""


class EngineProcess:
    """An engine in a process of its own, which never outlives the thread that made it.

    Args:
        command: the program to run; by default this interpreter with `octavo.engine_process`.

    Raises:
        ConfigError: there is no interpreter to run it with.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] | None = None) -> None:
        if command is None:
            # -P: a folder of the working directory must not hide an installed package.
            command = [str(find_interpreter()), "-P", "-m", "octavo.engine_process"]
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=with_huge_pages(package_path()),
            )
        logger.info("engine process %d started", self._process.pid)
        try:
            self.connection.send(config)
        except OSError:
            logger.warning("engine process %d ended as soon as it started", self._process.pid)

    @property
    def pid(self) -> int:
        """Id of the engine process."""
        return self._process.pid

    def describe_end(self) -> str:
        """Say by which signal or with which exit status the process ended."""
        return f"engine process {describe_end(self._process)}"

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, and kill it after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if timeout_s > 0.0:
                logger.warning("engine process %d did not end and is killed", self._process.pid)
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("engine process %d was killed but does not end", self._process.pid)


class EngineThread:
    """An engine in a daemon thread of this process, for tests and debugging."""

    def __init__(self, config: EngineConfig, engine_factory: EngineFactory = load_engine) -> None:
        self.connection, theirs = Pipe()
        self._thread = threading.Thread(
            target=self._run, args=(config, theirs, engine_factory), name="engine", daemon=True
        )
        self._thread.start()

    def _run(
        self, config: EngineConfig, connection: Connection, engine_factory: EngineFactory
    ) -> None:
        with connection:
            run_engine(config, connection, engine_factory)

    def describe_end(self) -> str:
        """Say that the thread ended."""
        return "engine thread ended"

    def stop(self, timeout_s: float) -> None:
        """Wait for the thread; one that is stuck in a step stays behind, for it cannot be ended."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("engine thread did not end within %g s", timeout_s)


def start_host(config: EngineConfig) -> EngineHost:
    """Start an engine where `config.engine_process` says."""
    return EngineProcess(config) if config.engine_process else EngineThread(config)
