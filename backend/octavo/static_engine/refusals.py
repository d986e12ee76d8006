"""What the traditional mode refuses: the one list that loads, requests and reports go by.

Knows nothing of models or of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.model.quantization import QUANTIZED

MODE = "in the traditional mode (model_impl static)"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An option, or a request's parameter, that must have one of a few values."""

    name: str
    allowed: tuple[object, ...]
    feature: str
    """What is off, in words for a report."""
    reason: str

    def complaint(self, value: object) -> str | None:
        """Say what is wrong with a value, or return None if it is allowed."""
        if value in self.allowed:
            return None
        allowed = " or ".join(map(repr, self.allowed))
        return f"{self.name} is {value!r} but must be {allowed} {MODE}: {self.reason}"


_NO_RANKS = "several ranks", "they take the native decoder"
OPTIONS = (
    Refusal("tensor_parallel_size", (1,), *_NO_RANKS),
    Refusal("pipeline_parallel_size", (1,), *_NO_RANKS),
    *(
        Refusal("quantization", ("none",), name, "transformers' own layers compute")
        for name in QUANTIZED
    ),
    Refusal("enable_lora", (False,), "LoRA", "adapters take the native decoder"),
    Refusal("preemption_mode", ("auto", "recompute"), "swap", "no KV leaves the device"),
)
BEAMS = Refusal("beam_width", (1,), "beam search", "beams cannot share a cache of unknown kind")


def check_options(config: EngineConfig) -> None:
    """Refuse options that have no meaning in the traditional mode.

    Raises:
        ConfigError: names one.
    """
    for each in OPTIONS:
        if complaint := each.complaint(getattr(config, each.name)):
            raise ConfigError(f"option {complaint}")


def check_beam_width(beam_width: int) -> None:
    """Raise InvalidRequest if a request asks for beams."""
    if complaint := BEAMS.complaint(beam_width):
        raise InvalidRequest(complaint)
