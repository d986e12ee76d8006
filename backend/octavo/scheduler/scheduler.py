"""Who runs in a step, with how many tokens, and who makes room.

There are no phases. A step spends one budget of tokens; each sequence asks for its uncomputed
tokens. Prefill, chunked prefill, decode and recomputation after preemption are the same line.
Knows nothing of torch, the model, text, the server or the clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError, InvalidRequest, PromptTooLong
from octavo.request import FinishReason, TokenOutput
from octavo.scheduler.output import SampledToken, ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and one sequence may take, in tokens and sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler:
    """First come, first served, over one pool of KV blocks.

    `running` and then `waiting` together are in order of arrival: admission never overtakes, and
    the sequence preempted is always the last one running. So the oldest sequence always advances,
    and everything ends.
    """

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, eos_token_ids: Collection[int]
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._live: dict[str, Sequence] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence still waits or runs."""
        return bool(self._live)

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over live sequences in order of arrival."""
        return chain(self.running, self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence behind all others.

        Raises:
            InvalidRequest: a live sequence has the same id, or the prompt is empty.
            PromptTooLong: the prompt and one token can never fit the context or the block pool.
        """
        if sequence.request_id in self._live:
            raise InvalidRequest(f"request id {sequence.request_id!r} is already in use")
        if not sequence.num_tokens:
            raise InvalidRequest("the prompt has 0 tokens but must have at least 1")
        room = self._room
        if sequence.num_tokens + 1 > room:
            raise PromptTooLong(
                f"prompt has {sequence.num_tokens:,} tokens but one sequence can hold {room:,} "
                "with its output; shorten it or raise max_model_len or num_kv_blocks"
            )
        self._live[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        """Plan one step and allocate its blocks.

        Mutates queues, statuses and block tables; token counts change only in `update`.
        """
        budget = self.limits.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []

        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            count = min(sequence.num_uncomputed_tokens, budget)
            if self.cache.allocate(sequence, sequence.num_computed_tokens + count):
                scheduled.append(_share(sequence, count))
                budget -= count
                index += 1
            else:
                preempted.append(self.preempt(self.running[-1]))

        while self.waiting and budget and not preempted and self._has_slot():
            sequence = self.waiting[0]
            if not self.cache.has_room(sequence, sequence.num_tokens + 1):
                break
            count = min(sequence.num_uncomputed_tokens, budget)
            self.cache.allocate(sequence, sequence.num_computed_tokens + count)
            scheduled.append(_share(sequence, count))
            budget -= count
            self.running.append(self.waiting.popleft())
            sequence.status = SequenceStatus.RUNNING

        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledToken, ...]
    ) -> list[TokenOutput]:
        """Advance the step's sequences and append what was drawn, one token a sampling row.

        Mutates sequences; those that end give their blocks back at once.
        """
        draws = iter(sampled)
        outputs = []
        for item in output.scheduled:
            sequence = item.sequence
            sequence.num_computed_tokens += item.num_scheduled_tokens
            if item.samples:
                outputs.append(self._append(sequence, next(draws)))
        return outputs

    def preempt(self, sequence: Sequence) -> Sequence:
        """Move a running sequence back to the head of the queue and drop its KV.

        It keeps its tokens and recomputes their KV when it is admitted again. Only the last
        running sequence keeps the order of arrival.
        """
        self.running.remove(sequence)
        self.cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        return sequence

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a live sequence from outside and free its blocks; None if it is not live."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, reason)
        return sequence

    def check_integrity(self) -> None:
        """Recount sequences and blocks.

        Raises:
            EngineError: a live sequence stands in no queue or in two, a table is too short for
                what was computed, or blocks are leaked, shared or free while owned.
        """
        queued = Counter(sequence.request_id for sequence in self.sequences())
        if queued != Counter(self._live.keys()):
            raise EngineError(f"queues hold {dict(queued)} but live are {sorted(self._live)}")
        for sequence in self._live.values():
            if sequence.num_computed_tokens > len(sequence.block_table) * self.cache.block_size:
                raise EngineError(f"{sequence} has computed more than its blocks hold")
        self.cache.check_integrity(self._live.values())

    @property
    def _room(self) -> int:
        """Tokens, prompt and output, that one sequence may ever hold."""
        return min(self.limits.max_model_len, self.cache.num_blocks * self.cache.block_size)

    def _has_slot(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _append(self, sequence: Sequence, drawn: SampledToken) -> TokenOutput:
        sequence.append_token(drawn.token_id)
        reason = self._reason_to_end(sequence, drawn.token_id)
        if reason is not None:
            self._end(sequence, reason)
        logprobs = () if drawn.logprob is None else (drawn.logprob,)
        return TokenOutput(sequence.request_id, (drawn.token_id,), logprobs, reason)

    def _reason_to_end(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in self.ending_token_ids(sequence):
            return FinishReason.STOP
        room = self._room
        max_tokens = sequence.params.max_tokens or room
        if sequence.num_output_tokens >= max_tokens or sequence.num_tokens >= room:
            return FinishReason.LENGTH
        return None

    def ending_token_ids(self, sequence: Sequence) -> frozenset[int]:
        """Return the token ids that end `sequence`."""
        stops = frozenset(sequence.params.stop_token_ids)
        return stops if sequence.params.ignore_eos else stops | self.eos_token_ids

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        queue = self.running if sequence.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(sequence)
        self.cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._live[sequence.request_id]


def _share(sequence: Sequence, count: int) -> ScheduledSequence:
    return ScheduledSequence(sequence, count, samples=count == sequence.num_uncomputed_tokens)
