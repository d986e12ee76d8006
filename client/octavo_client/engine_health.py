"""What a model says of its engine when asked for `health`; knows nothing of how it is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from octavo_client.errors import ServerError


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is, as the process that keeps it alive sees it."""

    engine: str
    """`ready`, `restarting`, or `failed`: it died too often and is not started again."""
    is_draining: bool
    """The server stops: live requests are finished, and there will be no others."""
    is_frozen: bool
    """It has said nothing for long, while requests wait; it is soon killed and restarted."""
    num_live_requests: int

    @property
    def is_given_up(self) -> bool:
        """Whether the engine does not come back by itself."""
        return self.engine == "failed" and not self.is_draining

    @classmethod
    def from_json(cls, text: str) -> EngineHealth:
        """Read the server's answer; keys that a later server adds are ignored.

        Raises:
            ServerError: it is no such answer.
        """
        try:
            values = json.loads(text)
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError):
            raise ServerError(f"the answer {text[:80]!r} does not say how the engine is") from None
