"""What rank zero and a worker say to each other while the model is loaded, one object at a time.

To the worker: an `Assignment`, then the `Blocks` that are agreed. From it, in order: a `Found`, a
`Loaded`, the `Blocks` that it has room for, a `Ready`; or a `RankFailed` at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is, and where it finds the others."""

    config: EngineConfig
    rank: int
    device: str
    """What the rank computes on, as its process numbers devices; `cuda`: what Ray gives it."""
    store_host: str
    """Where rank zero tells the ranks of each other: an address of its machine."""
    store_port: int
    num_threads: int
    timeout_s: float
    """How long a rank waits for another."""

    @property
    def shard(self) -> Shard:
        """The rank's place."""
        sizes = (self.config.tensor_parallel_size, self.config.pipeline_parallel_size)
        return Shard.of(self.rank, *sizes)


@dataclass(frozen=True, slots=True)
class Found:
    """The worker sees the checkpoint."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker has its part of the weights, and runs steps of the warm-up."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its KV blocks."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The worker cannot go on; it ends now."""

    message: str
    is_config: bool
    """Whether an option, the checkpoint or the machine is at fault."""
    lost_another: bool
    """Whether it only noticed that another rank is gone."""
