"""Waits for a device that may wait for another rank in vain.

A GPU's work says nothing of a peer that is gone: it goes on waiting, and who waits for it does too.
So rank zero looks at the device and at the other ranks in turns. Knows nothing of what is computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from octavo.errors import EngineError
from octavo.executor.block_transfers import Event

#: How often other ranks are looked at: seldom beside a step, soon beside who waits for an answer.
_CHECK_EVERY_S = 0.05


class Ranks(Protocol):
    """The other ranks, as `Workers` has them."""

    def check(self) -> None:
        """Raise EngineError, which names it, if one cannot go on."""

    def explain(self, noticed: str) -> EngineError:
        """Return why they do not get on."""


class StepWatch:
    """The end of the last step that was queued on a device.

    Args:
        record: marks the end of what is queued on the device so far; None where the host computes,
            which has nothing to wait for.
        ranks: whose work the step depends on.
        timeout_s: how long a step may take from when it is waited for.
        clock: seconds.
    """

    def __init__(
        self,
        record: Callable[[], Event] | None,
        ranks: Ranks,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._end: Event | None = None

    def mark(self) -> None:
        """Say that all of a step is queued."""
        if self._record is not None:
            self._end = self._record()

    def wait(self) -> None:
        """Return when the device is done with the step that was marked last.

        Raises:
            EngineError: another rank is gone, or the step takes too long; the message says which.
        """
        end, self._end = self._end, None
        if end is None:
            return
        started_s = checked_s = self._clock()
        # Asked again and again, as the driver itself would do it: to sleep costs part of a step.
        while not end.query():
            now_s = self._clock()
            if now_s - started_s > self._timeout_s:
                noticed = f"a step was not done within {self._timeout_s:g} s"
                raise self._ranks.explain(noticed)
            if now_s - checked_s > _CHECK_EVERY_S:
                self._ranks.check()
                checked_s = now_s
            os.sched_yield()


def make_step_watch(device: torch.device, ranks: Ranks, timeout_s: float) -> StepWatch:
    """Return the watch of a device, on the current stream of this thread."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return StepWatch(None if stream is None else stream.record_event, ranks, timeout_s)
