"""What is told of a request once it has its final answer: to the metrics, the log and the trace.

Holds no prompt and no text. Knows nothing of who is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import OctavoError
from octavo.request import FinishReason, SequenceTiming


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from arrival to final answer; times are of the monotonic clock, in seconds."""

    request_id: str
    """The engine's name for it; empty if it was refused before it had one."""
    client_request_id: str
    """The name its client gave it, often empty."""
    trace_context: str
    """The trace that the server put it in, as `InferenceTrace.get_context` gives it, or empty."""
    arrival_s: float
    first_token_s: float | None
    """When the first token came from the engine; None if none did."""
    end_s: float
    num_prompt_tokens: int
    """0 if it was refused before its prompt was tokenized."""
    num_generated_tokens: int
    """Tokens of all its answers that count for its client: none past a stop string."""
    finish_reason: FinishReason
    """Of several answers, that of the first."""
    was_refused: bool = False
    """Whether it was turned away before it ran: it was wrong, or there was no room or no engine."""
    error: OctavoError | None = None
    """What the client got instead of a last response."""
    lora_name: str | None = None
    """The adapter it named, one of the model's."""
    timing: SequenceTiming | None = None
    """Where the engine's time went; None if the engine was not asked or is gone."""


Reporter = Callable[[RequestRecord], None]
"""Who is told; called by whichever thread has answered, so it must not wait for anything."""
