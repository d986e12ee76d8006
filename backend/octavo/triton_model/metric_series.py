"""Gauges, counters and histograms of the server, each as it should be and as the server has it.

One thread writes; those that say what should be written never wait for it. A write that fails is
made again by the next one, and loses nothing. Knows nothing of what is measured.
"""

from __future__ import annotations

import logging
from collections import deque

from octavo.triton_model.pb_utils import Metric

#: Samples of one histogram that may wait to be written; more are dropped. The server takes some
#: tens of thousands a second.
MAX_WAITING_SAMPLES = 100_000

logger = logging.getLogger(__name__)


class Gauge:
    """A figure that goes up and down."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._wanted = 0.0
        self._written: float | None = None

    def observe(self, value: float) -> None:
        """Take the latest figure."""
        self._wanted = value

    def write_again(self) -> None:
        """Have the next `write` tell the server whatever it was told before."""
        self._written = None

    def write(self) -> None:
        """Tell the server if the figure has changed."""
        wanted = self._wanted
        if wanted != self._written:
            self._metric.set(wanted)
            self._written = wanted


class Counter:
    """A total that only grows, although what is counted may begin anew."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._last = 0.0
        self._total = 0.0
        self._written = 0.0

    def add(self, count: float) -> None:
        """Count more; at any time one thread only may."""
        self._total += count

    def observe(self, value: float) -> None:
        """Take the latest total of what begins anew with each engine."""
        self._total += value - self._last if value >= self._last else value
        self._last = value

    def write(self) -> None:
        """Tell the server by how much the total has grown."""
        total = self._total
        if total > self._written:
            self._metric.increment(total - self._written)
            self._written = total


class Histogram:
    """Samples, which the server takes one at a time."""

    def __init__(self, name: str, metric: Metric) -> None:
        self._name = name
        self._metric = metric
        self._waiting: deque[float] = deque()
        self._num_dropped = 0

    def observe(self, value: float) -> None:
        """Take a sample; one that comes while too many wait is dropped."""
        if len(self._waiting) < MAX_WAITING_SAMPLES:
            self._waiting.append(value)
        else:
            self._num_dropped += 1

    def write(self) -> None:
        """Tell the server the samples that wait now."""
        for _ in range(len(self._waiting)):
            self._metric.observe(self._waiting[0])
            self._waiting.popleft()
        if self._num_dropped:
            logger.warning("%s has lost %d samples: too many came", self._name, self._num_dropped)
            self._num_dropped = 0


Series = Gauge | Counter | Histogram
