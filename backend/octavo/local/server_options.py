"""What one local Triton server is asked to do; validated here, used by `triton_server`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError

#: Flags that `ServerOptions` has fields for; naming them twice would mislead the port check.
OWNED_FLAGS = frozenset(
    """--http-port --grpc-port --metrics-port --http-address --grpc-address --metrics-address
    --backend-directory --exit-timeout-secs --allow-http --log-file""".split()
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve, and where.

    Raises:
        ConfigError: a flag repeats a field.
    """

    model: str | None = None
    """Checkpoint, hub id or `demo`; with a repository it overrides every model's own."""
    repository: Path | None = None
    """Model repository; by default one is made with a single model named `octavo`."""
    extra_repositories: tuple[Path, ...] = ()
    """Further model repositories, served beside the first."""
    device: str | None = None
    """`cpu` or `cuda`; by default the engine's own choice."""
    tensor_parallel_size: int | None = None
    """Ranks that share every layer; by default the engine's own choice, here and below."""
    pipeline_parallel_size: int | None = None
    """Stages that share the layers."""
    host: str = "127.0.0.1"
    """Address that HTTP, gRPC and metrics listen on."""
    http_port: int = 8000
    """Port of HTTP; 0 takes a free one, here and below."""
    grpc_port: int = 8001
    """Port of gRPC."""
    metrics_port: int = 8002
    """Port of the metrics."""
    grace_s: float = 20.0
    """Seconds that Triton gets to leave when the server stops; then it is killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's own."""
    flags: tuple[str, ...] = ()
    """Further flags of `tritonserver`."""

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports by what they are for."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def http_keys(self) -> dict[str, str]:
        """Headers that open what the flags `--http-restricted-api=APIS:HEADER=VALUE` restrict."""
        parts = [value.partition("=") for value in self._values_of("--http-restricted-api")]
        return {apis.rpartition(":")[2]: value for apis, _, value in parts}

    @property
    def is_encrypted(self) -> bool:
        """Whether gRPC takes TLS alone."""
        return any(flag.startswith("--grpc-use-ssl") for flag in self.flags)

    @property
    def control_mode(self) -> str:
        """Which models Triton loads: `none` for all there are, `explicit` for those it is told."""
        return (*self._values_of("--model-control-mode"), "none")[0]

    @property
    def ends_at_failed_load(self) -> bool:
        """Whether Triton ends when a model fails to load, at its first try."""
        others = ("--exit-on-error", "--model-load-retry-count")
        return not any(flag.startswith(others) for flag in self.flags)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __post_init__(self) -> None:
        for flag in self.flags:
            if flag.partition("=")[0] in OWNED_FLAGS:
                name = flag.partition("=")[0]
                raise ConfigError(f"flag {name} is set by octavo itself; use its option instead")

    def _values_of(self, name: str) -> list[str]:
        """Return what a flag was given, joined to it by `=` or behind it."""
        joined = [flag.removeprefix(f"{name}=") for flag in self.flags if f"{name}=" in flag]
        apart = [value for flag, value in itertools.pairwise(self.flags) if flag == name]
        return [*joined, *apart]
