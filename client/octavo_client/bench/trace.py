"""What came of each request of a run, as it was seen at the client.

Times are seconds since the measured part of the run began. Knows nothing of figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

OK = "ok"
CANCELLED = "cancelled"
"""Cancelled by the workload, as planned."""
INTERRUPTED = "interrupted"
"""Still running when the whole run was stopped."""
SHORT = "SHORT"
"""Ended by itself, but with fewer tokens than were asked for in spite of `ignore_eos`."""
NO_FAILURES = (OK, CANCELLED, INTERRUPTED)


class Arrival(NamedTuple):
    """A response with new tokens."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One request from the moment at which it was due until it ended."""

    due_s: float
    """When it had to be sent."""
    sent_s: float
    """When it was sent."""
    end_s: float
    """When its last response, its error or its cancellation came."""
    num_input_tokens: int
    arrivals: tuple[Arrival, ...]
    outcome: str
    """`ok`, `cancelled`, `interrupted`, or the code of its failure."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None where the server did not tell."""
    error: str = ""
    """What the client was told of a failure."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def is_failure(self) -> bool:
        """Whether it ended otherwise than planned."""
        return self.outcome not in NO_FAILURES

    @property
    def time_to_first_token_s(self) -> float:
        """From when it was due to the first of its arrivals, of which there must be one."""
        return self.arrivals[0].at_s - self.due_s

    @property
    def latency_s(self) -> float:
        """From when it was due to its end."""
        return self.end_s - self.due_s


@dataclass(frozen=True, slots=True)
class Run:
    """What a plan led to; times in seconds."""

    traces: tuple[Trace, ...]
    """In the order in which the requests ended."""
    duration_s: float
    """From the start to the end of the last request."""
    cpu_s: float
    """CPU time of this process, all threads."""
    lags_s: tuple[float, ...]
    """By how much the event loop woke too late, each time that it was asked."""
    was_interrupted: bool
