"""Octavo's own traditional mode as a side: static batches of eight."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.transformers_side import StaticSide


class StaticEngineSide(StaticSide):
    """The engine of whole batches, `BATCH_SIZE` requests at a time, in the order of arrival."""

    title = "Octavo's traditional mode x8"
    worker = Path(__file__).with_name("static_worker.py")
