"""transformers as two sides: static batches of eight, and its own continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Environment
from benchmarks.peers.server_side import WorkerSide
from benchmarks.peers.side import Resources

from octavo.local.demo_model import demo_checkpoint

PAGE_TOKENS = 256


class StaticSide(WorkerSide):
    """`generate` on up to eight requests at a time, in the order of arrival."""

    name = "static"
    title = "transformers static x8"
    transport = "in process"
    environment = Environment(
        "transformers",
        ("torch==2.13.0", "transformers==5.24.0"),
        ("torch", "transformers"),
    )

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    @property
    def settings(self) -> Mapping[str, str]:
        """Return how requests are batched."""
        return {name: str(value) for name, value in self._mode.items()}

    @property
    def _mode(self) -> dict[str, Any]:
        return {"batch_size": 8}

    def install(self) -> Mapping[str, str]:
        """Make the environment, which both sides share."""
        return self.environment.install()

    def start(self) -> None:
        """Start the worker."""
        worker = Path(__file__).with_name("transformers_worker.py")
        threads = self._resources.threads
        self._launch(
            [str(self.environment.python), str(worker)],
            self.environment.folder / f"{self.name}.log",
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
