"""Octavo: paged, continuously batched LLM serving inside a standard Triton Inference Server."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.llm import LLM, Completion
    from octavo.sampling_params import SamplingParams
    from octavo.scheduling_params import SchedulingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "SamplingParams",
    "SchedulingParams",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.llm",
    "Completion": "octavo.llm",
    "EngineConfig": "octavo.config",
    "SamplingParams": "octavo.sampling_params",
    "SchedulingParams": "octavo.scheduling_params",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the client's install has no torch, which `octavo.llm` needs.
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
