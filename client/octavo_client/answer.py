"""What a caller receives: one `Delta` a response, or one `Completion` for the whole answer.

Knows nothing of tensors or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delta:
    """What one response added to the answer."""

    text: str
    """New text; may be empty while a character or a stop string is not yet complete."""
    token_ids: tuple[int, ...]
    """New token ids."""
    finish_reason: str | None
    """None while running, then `stop`, `length`, `abort`, `deadline` or `error`."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated since the last delta; the sum over all deltas is the true count."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one request."""

    text: str
    """The generated text, without the prompt."""
    token_ids: tuple[int, ...]
    """The generated token ids."""
    finish_reason: str | None
    """`stop`, `length`, `abort`, `deadline` or `error`; None if the server named none."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated."""

    @classmethod
    def from_deltas(cls, deltas: Iterable[Delta]) -> Completion:
        """Join the deltas of one request, in order."""
        parts = list(deltas)
        last = parts[-1] if parts else None
        return cls(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            finish_reason=last.finish_reason if last else None,
            num_input_tokens=last.num_input_tokens if last else 0,
            num_output_tokens=sum(part.num_output_tokens for part in parts),
        )
