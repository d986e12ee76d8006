"""Sides that are processes of this machine: an HTTP server, or a worker that reads standard input.

A peer is stopped (SIGSTOP) while others play, for some never sleep. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import Load
from benchmarks.peers.processes import Process, Server, Worker
from benchmarks.peers.side import Reply


class ProcessSide:
    """What both have in common."""

    _process: Process | None = None

    @property
    def process_id(self) -> int:
        """Return the root of the process tree."""
        assert self._process is not None, "the side was not started"
        return self._process.popen.pid

    def pause(self) -> None:
        """Stop the processes where they are."""
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        """Let the processes go on."""
        if self._process is not None:
            self._process.resume()

    def stop(self) -> None:
        """End the processes."""
        if self._process is not None:
            self._process.stop()


class ServerSide(ProcessSide):
    """A server that is asked over HTTP."""

    port = 0

    def _launch(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], health: str
    ) -> None:
        """Start the server and wait until the path `health` answers; `port` must be set."""
        server = Server(command, self.port, log, environment)
        self._process = server
        server.wait_ready(health)


class WorkerSide(ProcessSide):
    """A process of the peer's own environment that plays loads by itself."""

    _worker: Worker

    def _launch(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], options: Any
    ) -> None:
        """Start the worker and wait until it has read its options and its model."""
        self._process = self._worker = Worker(command, log, environment)
        self._worker.ask(options)

    def play(self, load: Load) -> list[Reply]:
        """Hand over a load and wait for the replies, timed by the worker's own clock."""
        answer = self._worker.ask(
            {
                "jobs": [[job.prompt_token_ids, job.num_output_tokens] for job in load.jobs],
                "arrivals_s": load.arrivals_s,
                "concurrency": load.concurrency,
            }
        )
        return [Reply(sent_s, tuple(token_s)) for sent_s, token_s in answer]
