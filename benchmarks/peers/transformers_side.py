"""transformers as two sides: static batches of eight, and its own continuous batching."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.environment import FOLDER, Environment
from benchmarks.peers.server_side import WorkerSide
from benchmarks.peers.side import Resources

from octavo.local.demo_model import demo_checkpoint

PAGE_TOKENS = 256
BATCH_SIZE = 8
OWN_ENVIRONMENT = Environment(
    "transformers", ("torch==2.13.0", "transformers==5.24.0"), ("torch", "transformers")
)


class PythonEnvironment(Protocol):
    """Where a worker runs, and what its packages are."""

    @property
    def folder(self) -> Path:
        """Return a folder for logs, which is there after `install`."""
        ...

    @property
    def python(self) -> Path:
        """Return the interpreter."""
        ...

    def install(self) -> Mapping[str, str]:
        """Make it, unless it is there; return versions."""
        ...


@dataclass(frozen=True, slots=True)
class ThisEnvironment:
    """That of this process, which has transformers too: nothing to install."""

    folder: Path = FOLDER / "this"
    python: Path = Path(sys.executable)

    def install(self) -> Mapping[str, str]:
        """Return versions."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {name: importlib.metadata.version(name) for name in OWN_ENVIRONMENT.shown}


class StaticSide(WorkerSide):
    """`generate` on `BATCH_SIZE` requests at a time at most, in the order of arrival."""

    name = "static"
    title = "transformers static x8"
    transport = "in process"
    worker = Path(__file__).with_name("transformers_worker.py")

    def __init__(
        self, resources: Resources, environment: PythonEnvironment = OWN_ENVIRONMENT
    ) -> None:
        self._resources = resources
        self._environment = environment

    @property
    def settings(self) -> Mapping[str, str]:
        """Return how requests are batched."""
        return {name: str(value) for name, value in self._mode.items()}

    @property
    def _mode(self) -> dict[str, Any]:
        return {"batch_size": BATCH_SIZE}

    def install(self) -> Mapping[str, str]:
        """Make the environment, which both sides share."""
        return self._environment.install()

    def start(self) -> None:
        """Start the worker."""
        threads = self._resources.threads
        self._launch(
            [str(self._environment.python), str(self.worker)],
            self._environment.folder / f"{self.name}.log",
            {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            {"model": str(demo_checkpoint()), "threads": threads, **self._mode},
        )


class ContinuousSide(StaticSide):
    """The manager of continuous batching, with its thread."""

    name = "continuous"
    title = "transformers continuous batching"

    @property
    def settings(self) -> Mapping[str, str]:
        """Return the options of its configuration."""
        return {name: str(value) for name, value in self._mode["continuous"].items()}

    @property
    def _mode(self) -> dict[str, Any]:
        return {
            "continuous": {
                "page_size": PAGE_TOKENS,
                "num_blocks": self._resources.kv_tokens // PAGE_TOKENS,
                "max_batch_tokens": 256,
                "max_requests_per_batch": 64,
            }
        }
