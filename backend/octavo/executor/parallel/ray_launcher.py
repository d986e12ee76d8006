"""`RayLauncher`: ranks as actors of an existing Ray cluster, told of steps over TCP.

Ray places them and ends them; what they say comes over connections of our own. Knows nothing of
models or of what ranks say.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError
from octavo.executor.parallel.keyed_tcp import KeyedListener, TcpSteps
from octavo.executor.parallel.rank_log import relay_log
from octavo.executor.parallel.rank_messages import Assignment
from octavo.executor.parallel.ray_messages import (
    Answer,
    DriverFailed,
    Explain,
    Explained,
    Hello,
    Join,
    Joined,
    Request,
    Start,
    Started,
)
from octavo.interpreter import find_interpreter, package_path
from octavo.model.devices import device_of_gpu
from octavo.process_end import describe_end

_MODULE = "octavo.executor.parallel.ray_driver"

#: What is handed over of the environment: names that begin so.
HANDED_OVER = ("OCTAVO_", "HF_")

#: What glibc reads when a process starts, and never again.
_FROM_THE_START = ("GLIBC_TUNABLES",)

#: Ray itself looks for this machine's raylet for a minute.
_JOIN_TIMEOUT_S = 80.0
_PLACE_TIMEOUT_S = 60.0
#: From the first actor's start to the last one's connection.
_HELLO_TIMEOUT_S = 60.0
_LOOK_S = 1.0
#: No more than this, nor than a share of what the engine may be silent: it shall say which rank is
#: gone before it is ended for it.
_EXPLAIN_S, _EXPLAIN_SHARE = 2.0, 1 / 3
#: What the driver takes longer than it is asked to, at most.
_GRACE_S = 10.0
_LEAVE_TIMEOUT_S = 5.0

A = TypeVar("A", bound=Answer)

logger = logging.getLogger(__name__)


class _Driver:
    """The process that speaks with the cluster; see `ray_driver`."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [str(find_interpreter()), "-P", "-m", _MODULE, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ray prints much that is of no use here; what is comes as an answer.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ray has its workers look for modules in its driver's folder before all others.
                cwd="/",
                env=package_path(),
            )
        self._connection: Connection = ours

    def ask(
        self, request: Request, kind: type[A], timeout_s: float, grace_s: float = _GRACE_S
    ) -> A:
        """Return the answer to a request, which may take `grace_s` longer than is asked for.

        Raises:
            EngineError: there is none, for the reason in the message.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout_s + grace_s):
                raise EngineError(
                    f"the Ray cluster does not answer for {timeout_s + grace_s:.0f} s"
                )
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            end = describe_end(self._process)
            raise EngineError(f"the process that speaks with the Ray cluster {end}") from error
        if isinstance(answer, DriverFailed):
            raise EngineError(answer.message)
        assert isinstance(answer, kind), f"{answer} to {request}"
        return answer

    def end(self) -> None:
        """Let it end what it started, and end it; Ray ends the rest by itself."""
        self._connection.close()
        try:
            self._process.wait(_LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class _Rank:
    """See RankProcess."""

    name: str
    pid: int
    connection: Connection
    rank: int
    driver: _Driver
    explain_s: float

    def describe_end(self) -> str:
        try:
            request = Explain(self.rank, self.explain_s)
            explained = self.driver.ask(request, Explained, self.explain_s, self.explain_s)
        except EngineError as error:
            return f"is gone: {error}"
        return explained.text or "closed its connection"


class RayLauncher:
    """See Launcher.

    Args:
        config: names the cluster, and what ranks are divided into.
        place_timeout_s: how long to wait for room in the cluster.

    Raises:
        ConfigError: Ray is not installed.
        EngineError: the cluster is not reached, or this machine is no node of it.
    """

    def __init__(self, config: EngineConfig, place_timeout_s: float = _PLACE_TIMEOUT_S) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "option distributed_executor_backend is 'ray' but Ray is not installed; "
                "install it with `pip install '.[server,ray]'` in a checkout"
            )
        self._place_timeout_s = place_timeout_s
        self.own_device: str | None = None
        self._explain_s = min(_EXPLAIN_S, _EXPLAIN_SHARE * config.step_timeout_s)
        self._ranks: list[_Rank] = []
        self._steps = TcpSteps(())
        self._driver = _Driver()
        try:
            joined = self._driver.ask(Join(config.ray_address), Joined, _JOIN_TIMEOUT_S)
            self.host = joined.host
            self._listener = KeyedListener(self.host)
        except BaseException:
            self._driver.end()
            raise

    def start(self, assignments: Sequence[Assignment]) -> Sequence[_Rank]:
        """Start actors, and take in their connections; see Launcher."""
        config = assignments[0].config
        request = Start(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            assignments[0].num_threads,
            int(assignments[0].device == "cuda"),
            {name: os.environ[name] for name in _FROM_THE_START if name in os.environ},
            self._place_timeout_s,
            self._listener.address,
            self._listener.key,
        )
        started = self._driver.ask(request, Started, self._place_timeout_s)
        if started.gpu is not None:
            self.own_device = str(device_of_gpu(started.gpu, os.environ))
        names = {
            each.rank: f"{each.shard} on {host}"
            for each, host in zip(assignments, started.hosts, strict=True)
        }
        self._take_in(names)
        self._ranks.sort(key=lambda rank: rank.rank)
        self._steps = TcpSteps([rank.connection for rank in self._ranks])
        handed_over, config = _handed_over(os.environ), with_absolute_paths(config)
        for rank, assignment in zip(self._ranks, assignments, strict=True):
            logger.info("process %d of %s started", rank.pid, rank.name)
            with suppress(OSError):  # who is gone is noticed when it is heard
                rank.connection.send(handed_over)
                rank.connection.send(replace(assignment, config=config))
        return tuple(self._ranks)

    def send_step(self, message: bytes, timeout_s: float) -> None:
        """Send a message to each rank; see Launcher."""
        self._steps.send(message, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Wait for the ranks, then let Ray kill them; see Launcher."""
        with suppress(EngineError):  # who does not read is ended too
            self._steps.send(b"", 0.0)
        self._wait_for_ends(timeout_s)
        self._driver.end()
        self._listener.close()
        for rank in self._ranks:
            rank.connection.close()
        self._ranks.clear()

    def _take_in(self, names: Mapping[int, str]) -> None:
        """Take in two connections of each rank, one for its log."""
        missing = {(rank, is_log) for rank in names for is_log in (False, True)}
        deadline_s = time.monotonic() + _HELLO_TIMEOUT_S
        while missing:
            connection = self._listener.accept(_LOOK_S)
            if connection is None:
                self._check_missing({rank: names[rank] for rank, _ in missing}, deadline_s)
                continue
            try:
                hello = connection.recv()
            except (EOFError, OSError):  # it is among the missing, and found out below
                continue
            missing.discard((hello.rank, hello.is_log))
            self._greet(hello, connection, names[hello.rank])

    def _greet(self, hello: Hello, connection: Connection, name: str) -> None:
        hello.check_versions(name)
        if hello.is_log:
            thread = threading.Thread(target=relay_log, args=(connection,), daemon=True)
            thread.start()
            return
        rank = _Rank(name, hello.pid, connection, hello.rank, self._driver, self._explain_s)
        self._ranks.append(rank)

    def _check_missing(self, names: Mapping[int, str], deadline_s: float) -> None:
        """Raise EngineError if one of these ranks will not come any more."""
        for rank, name in names.items():
            explained = self._driver.ask(Explain(rank, 0.0), Explained, 0.0)
            if explained.text is not None:
                raise EngineError(f"{name} {explained.text}, before it reached rank 0")
        if time.monotonic() > deadline_s:
            host, port = self._listener.address
            raise EngineError(
                f"{' and '.join(names.values())} did not reach rank 0 at {host}:{port} within "
                f"{_HELLO_TIMEOUT_S:g} s"
            )

    def _wait_for_ends(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        waiting = [rank.connection for rank in self._ranks]
        while waiting and (ready := wait(waiting, max(0.0, deadline_s - time.monotonic()))):
            for connection in [each for each in waiting if each in ready]:
                try:
                    connection.recv_bytes()
                except (EOFError, OSError):
                    waiting.remove(connection)


def with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Return the same options, with paths that do not count from this process's folder.

    Links stay: another node may have them lead elsewhere.
    """
    model, adapters = Path(config.model), config.multi_lora
    return replace(
        config,
        model=str(model.absolute()) if model.exists() else config.model,
        multi_lora=None if adapters is None else str(Path(adapters).absolute()),
    )


def _handed_over(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(HANDED_OVER)}
