"""When requests must have ended; knows nothing of what they are or of the clock."""

from __future__ import annotations

import heapq


class Deadlines:
    """Deadlines of requests by id, earliest first; every operation is amortised O(log n)."""

    def __init__(self) -> None:
        self._deadline_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadline_s)

    def add(self, request_id: str, deadline_s: float) -> None:
        """Remember the deadline of a request that has none yet."""
        self._deadline_s[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request_id))

    def discard(self, request_id: str) -> None:
        """Forget a request, if it has a deadline."""
        if self._deadline_s.pop(request_id, None) is not None and self._is_mostly_forgotten():
            self._heap = [(at_s, request) for request, at_s in self._deadline_s.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_s: float) -> list[str]:
        """Forget and return the requests whose deadline is not after `now_s`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, request_id = heapq.heappop(self._heap)
            if self._deadline_s.get(request_id) == at_s:
                del self._deadline_s[request_id]
                due.append(request_id)
        return due

    def _is_mostly_forgotten(self) -> bool:
        return len(self._heap) > 2 * len(self._deadline_s) + 64
