"""Who may come in: into the queue, and from the queue among those who run.

Answers questions only, and changes nothing but its counters. Knows nothing of order or time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import chain

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.cache.prefix_cache import CachedPrefix
from octavo.errors import InvalidRequest, PromptTooLong, QueueFull
from octavo.scheduler.policy import Policy
from octavo.scheduler.seating import Seating
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.scheduler.whole_batches import BatchRule, WholeBatches
from octavo.sequence import Sequence

#: Share of the blocks that is left to those who run, so that whom they let in does not have to
#: make room for them at once.
RESERVE = 0.01


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step, a sequence and the queue may take, in tokens and sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    num_stages: int = 1
    """Steps that compute at once; each takes its share of those who run."""
    num_adapter_slots: int = 0
    """Adapters that are in memory at once; at first those of the lowest numbers."""
    batch_rule: BatchRule | None = None
    """What a batch may hold, if who waits comes in only when nobody runs."""


class Admission:
    """The rules of admission over one cache, one queue and one set of seats."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        seating: Seating,
        policy: Policy,
    ) -> None:
        self.max_num_tokens = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        """Tokens, prompt and output, that one sequence may ever hold."""
        self.num_requests_refused = 0
        self.num_tokens_refused = 0
        self._limits = limits
        self._cache = cache
        self._waiting = waiting
        self._seating = seating
        self._reserve = math.ceil(cache.num_blocks * RESERVE)
        self._batches: WholeBatches | None = None
        if limits.batch_rule is not None:
            self._batches = WholeBatches(
                limits.batch_rule, policy, cache.num_blocks, cache.block_size
            )

    def check_possible(self, sequence: Sequence) -> None:
        """Raise InvalidRequest or PromptTooLong if a sequence can never run."""
        if not sequence.num_tokens:
            raise InvalidRequest("the prompt has 0 tokens but must have at least 1")
        room = self.room_of(sequence)
        key, what = ("n", "answers") if sequence.params.beam_width == 1 else ("beam_width", "beams")
        if sequence.num_seats > self._limits.max_num_seqs:
            raise InvalidRequest(
                f"{key} is {sequence.num_seats} but "
                f"max_num_seqs is {self._limits.max_num_seqs}; lower it or raise max_num_seqs"
            )
        if room < sequence.num_tokens + 1 <= self.max_num_tokens:
            raise PromptTooLong(
                f"prompt has {sequence.num_tokens:,} tokens but each of {sequence.num_seats} "
                f"{what} can hold {room:,} with its output; shorten it, lower {key} or raise "
                "num_kv_blocks"
            )
        if sequence.num_tokens + 1 > self.max_num_tokens:
            raise PromptTooLong(
                f"prompt has {sequence.num_tokens:,} tokens but one sequence can hold "
                f"{self.max_num_tokens:,} with its output; shorten it or raise max_model_len or "
                "num_kv_blocks"
            )
        num_blocks = self._cache.num_blocks_for(sequence.num_tokens + 1) + sequence.num_seats - 1
        if num_blocks > self._cache.num_blocks:
            raise PromptTooLong(
                f"prompt has {sequence.num_tokens:,} tokens and n is {sequence.num_seats}, which "
                f"takes {num_blocks:,} KV blocks of {self._cache.num_blocks:,}; shorten it, lower "
                "n or raise num_kv_blocks"
            )

    def room_of(self, sequence: Sequence) -> int:
        """Return the tokens, prompt and output, that it or a fork of it may ever hold.

        Beams wait for one another, so all must fit in at once, though they share nothing; and so
        must answers whose batch reserves room for them.
        """
        if self._batches is not None:
            num_blocks = self._cache.num_blocks // sequence.num_seats
            return min(self.max_num_tokens, num_blocks * self._cache.block_size)
        beam_width = sequence.params.beam_width
        if beam_width == 1:
            return self.max_num_tokens
        num_blocks = (self._cache.num_blocks - self._reserve) // beam_width
        return min(self.max_num_tokens, num_blocks * self._cache.block_size - 1)

    def check_queue(self, sequence: Sequence) -> None:
        """Raise QueueFull if as much waits as may wait.

        What the next step can start does not count, nor what was admitted before and waits again,
        unless that is more than have seats; and a request that would wait alone is never refused
        for its tokens. Who goes before some who run passes the limits by as much as these are.
        """
        limits = self._limits
        most_requests, most_tokens = limits.max_num_queued_requests, limits.max_num_queued_tokens
        if most_requests is None and most_tokens is None:
            return
        staying = self._staying(sequence)
        if staying is None:
            return
        num_requests, num_tokens = staying
        replaced = self._replaced_by(sequence)
        if most_requests is not None and num_requests - len(replaced) >= most_requests:
            self.num_requests_refused += 1
            raise QueueFull(
                f"{that_wait(num_requests, 'request')} and max_num_queued_requests is "
                f"{most_requests:,}; send the request again later"
            )
        num_tokens_replaced = sum(each.num_tokens for each in replaced)
        if (
            most_tokens is not None
            and num_tokens
            and num_tokens + sequence.num_tokens - num_tokens_replaced > most_tokens
        ):
            self.num_tokens_refused += 1
            raise QueueFull(
                f"{that_wait(num_tokens, 'token')}, the prompt has {sequence.num_tokens:,} and "
                f"max_num_queued_tokens is {most_tokens:,}; send the request again later"
            )

    @property
    def newcomer(self) -> Sequence | None:
        """Who comes in next, if there is room: the head of the queue, or who suits the batch."""
        if self._batches is None:
            return self._waiting.head
        return next(self._batches.joining(self._seating.running, self._waiting.admissible()), None)

    def fits(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Return whether `sequence` can come in now.

        It must have a seat and blocks that nobody seated needs next, and nothing of its `prefix`
        must be about to come.
        """
        seating = self._seating
        if self._batches is not None and not self._batches.has_room(seating.running, sequence):
            return False
        if prefix.is_coming or sequence.num_seats > seating.num_free_seats:
            return False
        num_spare = self._num_spare_blocks(list(seating))
        return self._num_blocks_needed(sequence, prefix) <= num_spare

    def could_fit(self, sequence: Sequence, prefix: CachedPrefix, place: int) -> bool:
        """Return whether it would fit if all who run from `place` on made room."""
        if self._batches is not None:
            return False
        seating = self._seating
        leaving = seating.running[place:]
        num_free_seats = seating.num_free_seats + sum(each.num_seats for each in leaving)
        if prefix.is_coming or not leaving or sequence.num_seats > num_free_seats:
            return False
        staying = [*seating.running[:place], *seating.restoring.values()]
        num_freed = self._cache.num_blocks_freed_by(leaving, prefix)
        num_spare = self._num_spare_blocks(staying) + num_freed
        return self._num_blocks_needed(sequence, prefix) <= num_spare

    def _num_blocks_needed(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Return the free blocks for all it knows, its next token, and what each fork copies."""
        num_tokens = sequence.num_tokens + 1
        num_blocks = self._cache.num_blocks_to_admit(prefix, num_tokens)
        return num_blocks + sequence.num_seats - 1

    def _num_spare_blocks(self, seated: List[Sequence]) -> int:
        """Return the free blocks that those seated need neither now nor next."""
        if not seated:
            return self._cache.num_free_blocks
        size = self._cache.block_size
        promised = sum(len(s.token_ids) // size + s.num_seats - len(s.block_table) for s in seated)
        return self._cache.num_free_blocks - promised - self._reserve

    def _replaced_by(self, newcomer: Sequence) -> List[Sequence]:
        """Return those running in whose place `newcomer` may come in although the queue is full.

        Each that made room before and waits again leaves one place less: else requests that are
        ever more urgent would make all that run wait, again and again, without an end.
        """
        if self._batches is not None:
            return []
        running = self._seating.running
        num_places = max(0, self._limits.max_num_seqs - self._waiting.num_returned)
        return running[max(self._seating.place_of(newcomer), len(running) - num_places) :]

    def _staying(self, newcomer: Sequence) -> tuple[int, int] | None:
        """Return how many requests that count, and their tokens, the next step leaves in the queue.

        None if it can start `newcomer`, and before that all whom `newcomer` may not pass, or could
        if no adapter were waited for.
        """
        waiting, running = self._waiting, self._seating.running
        num_staying, num_tokens = waiting.num_new, waiting.num_new_tokens
        if waiting.num_returned > self._limits.max_num_seqs:
            num_staying, num_tokens = waiting.num_requests, waiting.num_tokens
        num_free_seats = self._seating.num_free_seats
        num_blocks = self._num_spare_blocks(list(self._seating))
        budget = self._limits.max_num_batched_tokens - sum(s.num_uncomputed_tokens for s in running)
        batch = running.copy()
        queue: Iterable[Sequence] = chain(waiting.admissible(), (newcomer,))
        if self._batches is not None:
            queue = self._batches.joining(batch, queue)
        for sequence in queue:
            if self._batches is not None and not self._batches.has_room(batch, sequence):
                return num_staying, num_tokens
            batch.append(sequence)
            num_free_seats -= sequence.num_seats
            num_blocks -= self._cache.num_blocks_for(sequence.num_tokens + 1)
            num_blocks -= sequence.num_seats - 1
            if budget <= 0 or num_free_seats < 0 or num_blocks < 0:
                return num_staying, num_tokens
            budget -= sequence.num_uncomputed_tokens
            if not sequence.num_preemptions:
                num_staying -= 1
                num_tokens -= sequence.num_tokens
        if batch[-1] is not newcomer:
            return num_staying, num_tokens  # it suits no batch that begins now
        if waiting.is_open_to(newcomer) or not waiting.num_held:
            return None
        return num_staying + 1, num_tokens + newcomer.num_tokens  # it was taken off too


def that_wait(number: int, noun: str) -> str:
    """Say that so many wait."""
    return f"1 {noun} waits" if number == 1 else f"{number:,} {noun}s wait"
