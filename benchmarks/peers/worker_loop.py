"""What every worker does: read options, then answer loads; one JSON line in, one out.

Runs in a peer's own environment, beside the worker that imports it: the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 1.0
"""How long a worker sleeps at most when it has nothing to do."""


class RequestQueue:
    """The requests of a load in the order of their arrivals, and the times of what was answered."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.jobs: list[tuple[list[int], int]] = load["jobs"]
        self._arrivals_s: list[float] = load["arrivals_s"]
        self._concurrency: int = load["concurrency"]
        self._num_taken = 0
        self._start_s = time.perf_counter()
        self.replies: list[tuple[float, list[float]]] = [(0.0, []) for _ in self.jobs]
        """When each request was sent, and when its tokens came, in seconds from the start."""

    @property
    def has_more(self) -> bool:
        """Return whether a request was not taken yet."""
        return self._num_taken < len(self.jobs)

    def take(self, num_running: int, most: int | None = None) -> list[int]:
        """Take the requests that have arrived, as many as may run beside those that do."""
        room = self._concurrency - num_running
        taken = []
        now_s = self.since_start(time.perf_counter())
        while (
            self.has_more
            and len(taken) < min(room, most or room)
            and self._arrivals_s[self._num_taken] <= now_s
        ):
            taken.append(self._num_taken)
            self.replies[self._num_taken] = (now_s, [])
            self._num_taken += 1
        return taken

    def wait_s(self, num_running: int) -> float:
        """Return how long nothing can be taken, in seconds, if nothing ends."""
        if not self.has_more or num_running >= self._concurrency:
            return LOOK_S
        arrival_s = self._arrivals_s[self._num_taken]
        return min(LOOK_S, max(0.0, arrival_s - self.since_start(time.perf_counter())))

    def since_start(self, moment_s: float) -> float:
        """Turn a time of `perf_counter` into seconds from the start."""
        return moment_s - self._start_s

    def came(self, request: int, count: int) -> None:
        """Note that so many tokens of a request are there now."""
        now_s = self.since_start(time.perf_counter())
        self.replies[request][1].extend([now_s] * count)


def serve(load_model: Callable[[dict[str, Any]], Callable[[RequestQueue], None]]) -> None:
    """Load the model as the first line says, then play what each further line holds."""
    # Libraries print too; the answers' pipe is not theirs.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        play = load_model(json.loads(sys.stdin.readline()))
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            queue = RequestQueue(json.loads(line))
            play(queue)
            print(json.dumps(queue.replies), file=answers, flush=True)
