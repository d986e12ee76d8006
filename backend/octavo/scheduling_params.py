"""How one request stands among others, and when it must have ended; validated once, frozen after.

Knows nothing of the server, of queues or of the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.errors import InvalidRequest
from octavo.request_keys import check_range, read_value

MAX_NAME_LENGTH = 256
#: About 31 years: a time that a monotonic clock in seconds still tells apart to the microsecond.
MAX_DEADLINE_MS = 1e12

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Scheduling of one request; numbers may be given as strings.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range.
    """

    priority: int = 0
    """Lower runs first, under `scheduling_policy` `priority`."""
    deadline_ms: float | None = None
    """Milliseconds from arrival after which the request ends with what it has. Absent: never."""
    tenant: str = ""
    """Who the request is for: under `scheduling_policy` `fair`, tenants share the service."""
    cache_salt: str = ""
    """Only requests of the same salt reuse each other's cached prefixes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = read_value(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        allowed = f"an integer from {_INT32_MIN:,} to {_INT32_MAX:,}"
        check_range("priority", self.priority, _INT32_MIN, _INT32_MAX, allowed)
        if self.deadline_ms is not None:
            allowed = f"a number of milliseconds in (0, {MAX_DEADLINE_MS:,.0f}]"
            check_range("deadline_ms", self.deadline_ms, math.ulp(0.0), MAX_DEADLINE_MS, allowed)
        for key in ("tenant", "cache_salt"):
            length = len(getattr(self, key))
            if length > MAX_NAME_LENGTH:
                raise InvalidRequest(
                    f"{key} has {length:,} characters but must have at most {MAX_NAME_LENGTH}"
                )

    def at_the_latest(self, deadline_ms: float) -> SchedulingParams:
        """Return a copy that ends after `deadline_ms`, or earlier if its own deadline is."""
        own = MAX_DEADLINE_MS if self.deadline_ms is None else self.deadline_ms
        return replace(self, deadline_ms=min(own, deadline_ms))

    def deadline_s(self, arrival_s: float) -> float | None:
        """Return when a request that arrived at `arrival_s` must have ended, if ever."""
        return None if self.deadline_ms is None else arrival_s + self.deadline_ms / 1000.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SchedulingParams:
        """Build from request keys, leaving out those of `SamplingParams`, which stand beside."""
        own = {key: values[key] for key in SCHEDULING_KEYS if values.get(key) is not None}
        return cls(**own)


#: What a request may name.
SCHEDULING_KEYS = tuple(field.name for field in fields(SchedulingParams))
