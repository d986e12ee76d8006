"""OpenVINO GenAI as a side: its continuous batching pipeline in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Environment, make_once, run
from benchmarks.peers.server_side import WorkerSide
from benchmarks.peers.side import Resources

from octavo.local.demo_model import demo_checkpoint

BLOCK_TOKENS = 32
"""Of its KV cache on a CPU."""


class OpenVinoSide(WorkerSide):
    """The pipeline's step loop, fed with token ids; it has no server to go through."""

    name = "openvino"
    title = "OpenVINO GenAI"
    transport = "in process"
    environment = Environment(
        "openvino",
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel[openvino]==2.2.0",
        ),
        ("openvino", "openvino-genai", "optimum-intel"),
    )

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    @property
    def settings(self) -> Mapping[str, str]:
        """Return scheduler options and properties beside the defaults."""
        return {name: str(value) for name, value in (self._scheduler | self._properties).items()}

    @property
    def _scheduler(self) -> dict[str, Any]:
        return {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "num_kv_blocks": self._resources.kv_tokens // BLOCK_TOKENS,
        }

    @property
    def _properties(self) -> dict[str, Any]:
        return {
            "INFERENCE_NUM_THREADS": self._resources.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
        }

    @property
    def _model(self) -> Path:
        return self.environment.folder / "model"

    def install(self) -> Mapping[str, str]:
        """Make the environment and convert the model."""
        versions = self.environment.install()
        make_once(self._model, str(versions), self._convert)
        return versions

    def _convert(self, folder: Path) -> None:
        program = self.environment.python.with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        run(
            [str(program), "export", "openvino", "-m", str(demo_checkpoint()), *task, str(folder)],
            self.environment.folder / "install.log",
            {"HF_HUB_OFFLINE": "1"},
        )

    def start(self) -> None:
        """Start the worker, which compiles the model."""
        folder = self.environment.folder
        worker = Path(__file__).with_name("openvino_worker.py")
        self._launch(
            [str(self.environment.python), str(worker)],
            folder / "worker.log",
            {},
            {
                "model": str(self._model),
                "scheduler": self._scheduler,
                "properties": self._properties,
            },
        )
