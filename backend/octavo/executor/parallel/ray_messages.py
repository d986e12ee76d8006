"""What a `RayLauncher`, its driver and its ranks say to each other before a rank is assigned.

The launcher asks its driver one thing at a time, and gets what is named, or a `DriverFailed`. A
rank says `Hello` on each of its connections.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Join:
    """Become a driver of the cluster at an address; answered by `Joined`."""

    address: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The launcher's machine is a node of the cluster."""

    host: str
    """Its address as other nodes reach it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Reserve what all ranks need, and start all but rank zero; answered by `Started`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_cpus: int
    """Of each rank."""
    num_gpus: int
    """Of each rank: 1 or 0."""
    environment: dict[str, str]
    """Variables that their processes are started with, beside those of their nodes."""
    place_timeout_s: float
    address: tuple[str, int]
    """Where ranks say Hello."""
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks have their places, and begin."""

    hosts: tuple[str, ...]
    """Addresses of their nodes, from rank 1 on."""
    gpu: str | None
    """What Ray calls the GPU that is reserved for rank zero; None without GPUs."""


@dataclass(frozen=True, slots=True)
class Explain:
    """Say how a rank ended, if it does within a time; answered by `Explained`."""

    rank: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Explained:
    """How a rank ended, in words that follow its name; None if it did not."""

    text: str | None


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """What was asked for cannot be had."""

    message: str


Request = Join | Start | Explain
Answer = Joined | Started | Explained | DriverFailed


def versions() -> str:
    """Return what must be the same where ranks are to work together."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("octavo", "torch")]
    return ", ".join([*packages, f"Python {platform.python_version()}"])


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says first."""

    rank: int
    is_log: bool
    """Whether nothing but its log comes this way."""
    pid: int = field(default_factory=os.getpid)
    versions: str = field(default_factory=versions)

    def check_versions(self, name: str) -> None:
        """Raise ConfigError if the rank of this name has other versions than this process."""
        if self.versions != (own := versions()):
            raise ConfigError(f"{name} has {self.versions} but rank 0 has {own}; install the same")
