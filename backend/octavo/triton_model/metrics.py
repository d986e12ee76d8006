"""The engine's figures as gauges of Triton's own metrics endpoint.

Every write is a round trip to the server, so only what changed is written, and not more often than
every 100 ms. Knows nothing of requests or of where the figures come from.
"""

from __future__ import annotations

from octavo.request import StepStats
from octavo.triton_model.pb_utils import PbUtils

WRITE_INTERVAL_S = 0.1

_GAUGES = {
    "octavo_num_requests_running": "Requests that own KV blocks",
    "octavo_num_requests_waiting": "Requests that wait for their turn",
    "octavo_kv_blocks_total": "KV blocks of the engine",
    "octavo_kv_blocks_used": "KV blocks that requests own",
    "octavo_engine_up": "1 while the engine runs, 0 while it is dead or starting",
}


class EngineMetrics:
    """Gauges of one model; one thread writes them."""

    def __init__(self, pb_utils: PbUtils, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        # The server forgets a metric when its family is collected, so families are kept.
        self._families = [
            pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)
            for name, text in _GAUGES.items()
        ]
        self._gauges = {
            name: family.Metric(labels=labels)
            for name, family in zip(_GAUGES, self._families, strict=True)
        }
        self._wanted: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._last_write_s = float("-inf")

    def observe(self, stats: StepStats, engine_up: bool) -> None:
        """Take the latest figures; nothing is written yet."""
        self._wanted = {
            "octavo_num_requests_running": stats.num_running,
            "octavo_num_requests_waiting": stats.num_waiting,
            "octavo_kv_blocks_total": stats.num_blocks,
            "octavo_kv_blocks_used": stats.num_blocks - stats.num_free_blocks,
            "octavo_engine_up": int(engine_up),
        }

    def flush(self, now_s: float) -> float | None:
        """Write what changed if enough time has passed.

        Returns the seconds until the next call is due, or None when everything is written.
        """
        if self._wanted == self._written:
            return None
        remaining_s = self._last_write_s + WRITE_INTERVAL_S - now_s
        if remaining_s > 0.0:
            return remaining_s
        for name, value in self._wanted.items():
            if self._written.get(name) != value:
                self._gauges[name].set(value)
        self._written = self._wanted
        self._last_write_s = now_s
        return None
