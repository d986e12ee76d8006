"""Whose turn it is to be asked whether the client is gone.

Asking is a round trip to the server, so few are asked at a time. Knows nothing of what follows from
the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TypeVar

#: How often some are asked.
INTERVAL_S = 0.02
#: Asked each time, in turn. Each answer takes three threads of two processes: 16 at a time cost 5 %
#: of the tokens that an engine on two cores made for 64 streams.
BATCH = 4
#: However many there are, each is asked once in this time.
ROUND_S = 1.0

Live = TypeVar("Live")


class ClientRound:
    """Goes round the live requests, again and again."""

    def __init__(self) -> None:
        self.next_s = 0.0
        """When the next are to be asked, by the monotonic clock."""
        self._left: deque[str] = deque()  # no more: Triton keeps a model while a sender lives

    def due(self, live: Mapping[str, Live], now_s: float) -> Iterator[Live]:
        """Yield those of `live` to be asked now; it may lose some meanwhile."""
        if now_s < self.next_s:
            return
        self.next_s = now_s + INTERVAL_S
        if not self._left:
            self._left.extend(live)
        num_asked, most = 0, max(BATCH, int(len(live) * INTERVAL_S / ROUND_S))
        while self._left and num_asked < most:
            each = live.get(self._left.popleft())
            if each is not None:  # asking after the final response is forbidden
                num_asked += 1
                yield each
