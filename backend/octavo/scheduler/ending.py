"""Ends sequences, wherever they stand, and gives back what they hold.

Knows nothing of steps, nor of what a sequence has generated.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import OctavoError
from octavo.request import FinishReason, TokenOutput
from octavo.scheduler.live_requests import LiveRequests
from octavo.scheduler.policy import Policy
from octavo.scheduler.seating import Seating
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.sequence import Sequence, SequenceStatus


class Ending:
    """The end of sequences of one queue, one set of seats and one cache."""

    def __init__(
        self,
        live: LiveRequests,
        waiting: WaitingQueue,
        seating: Seating,
        cache: KVCacheManager,
        policy: Policy,
    ) -> None:
        self._live = live
        self._waiting = waiting
        self._seating = seating
        self._cache = cache
        self._policy = policy

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a live sequence; its blocks are free at once, or when what comes to them has."""
        if sequence.status is SequenceStatus.RUNNING:
            self._seating.leave(sequence)
            self._cache.free(sequence)
        elif sequence.status is not SequenceStatus.RESTORING:  # whose blocks are being written
            self._waiting.remove(sequence)
            self._cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._policy.leave(sequence)
        self._live.remove(sequence)

    def end_request(
        self, request_id: str, reason: FinishReason, index: int | None = None
    ) -> list[Sequence]:
        """End a request, or one of its answers, and return the sequences that were still live.

        Answers that come of beams end all together.
        """
        live = self._live.sequences_of(request_id)
        ended = [s for s in live if index in (None, s.index) or s.search is not None]
        for sequence in ended:
            self.end(sequence, reason)
        return ended

    def end_overdue(self, now_s: float) -> list[TokenOutput]:
        """End the requests whose deadline has passed, with an output for each of their answers."""
        return [
            output
            for request_id in self._live.pop_overdue(now_s)
            for output in last_outputs(self.end_request(request_id, FinishReason.DEADLINE), now_s)
        ]


def last_outputs(
    ended: Iterable[Sequence], now_s: float, error: OctavoError | None = None
) -> list[TokenOutput]:
    """Return an output without tokens for each answer that ended sequences stand for."""
    return [
        TokenOutput(
            sequence.request_id,
            (),
            (),
            sequence.finish_reason,
            error,
            index,
            sequence.timing(now_s),
        )
        for sequence in ended
        for index in sequence.answers
    ]
