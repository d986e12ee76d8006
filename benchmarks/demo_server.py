"""The demo model behind its own Triton server, with engine options; for scripts that measure it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.local.demo_model import demo_checkpoint
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer


@contextmanager
def serving(options: Mapping[str, int]) -> Iterator[TritonServer]:
    """Serve the demo model with these engine options, and without a prefix cache.

    Whoever sends the same prompts in every play then finds none of them in a cache.
    """
    environment = {f"OCTAVO_{name.upper()}": str(value) for name, value in options.items()}
    environment["OCTAVO_ENABLE_PREFIX_CACHING"] = "false"
    model, ports = str(demo_checkpoint()), {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with TritonServer(ServerOptions(model=model, **ports, environment=environment)) as server:
        server.wait_ready(timeout_s=120)
        yield server
