"""Octavo as a side: its own Triton server, asked through gRPC."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.grpc_stream import play_on_one_stream
from benchmarks.peers.loads import Load
from benchmarks.peers.side import Reply, Resources, Unavailable

import octavo
from octavo.errors import OctavoError
from octavo.local.demo_model import demo_checkpoint
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

START_TIMEOUT_S = 300.0


class OctavoSide:
    """One Triton server with the engine in a process of its own."""

    name = "octavo"
    title = "Octavo"
    transport = "gRPC"

    def __init__(self, resources: Resources) -> None:
        self._environment = {
            "OCTAVO_CPU_THREADS": str(resources.threads),
            "OCTAVO_KV_CACHE_MEMORY_BYTES": str(resources.kv_bytes),
        }
        self._server: TritonServer | None = None

    @property
    def settings(self) -> Mapping[str, str]:
        """Return the options that are not defaults."""
        return self._environment

    def install(self) -> Mapping[str, str]:
        """Return versions; it runs in this process's own environment."""
        revision = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        return {
            "octavo": octavo.__version__,
            "revision": revision or "unknown",
            "torch": importlib.metadata.version("torch"),
            "nvidia-pytriton": importlib.metadata.version("nvidia-pytriton"),
        }

    def start(self) -> None:
        """Start the server."""
        options = ServerOptions(
            model=str(demo_checkpoint()),
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            environment=self._environment,
        )
        self._server = TritonServer(options)
        try:
            self._server.start()
            self._server.wait_ready(START_TIMEOUT_S)
        except OctavoError as error:
            raise Unavailable(str(error)) from error

    @property
    def process_id(self) -> int:
        """Return the server's process."""
        assert self._server is not None
        return self._server.pid

    def play(self, load: Load) -> list[Reply]:
        """Send all requests over one gRPC stream."""
        assert self._server is not None
        return play_on_one_stream(self._server.grpc_url, load)

    def pause(self) -> None:
        """Do nothing: an idle server sleeps."""

    def resume(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()
