"""Who runs in a step, with how many tokens, and who makes room.

There are no phases. A step spends one budget of tokens; each sequence asks for its uncomputed
tokens. Prefill, chunked prefill, decode, recomputation, a prefix hit and the return from host
memory are the same line. Knows nothing of torch, the model, text or the server; the clock is an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import InvalidRequest
from octavo.request import FinishReason, TokenLogprobs, TokenOutput
from octavo.scheduler.adapter_slots import AdapterSlots
from octavo.scheduler.admission import Admission, SchedulerLimits
from octavo.scheduler.beams import Beams, wait_for_others
from octavo.scheduler.ending import Ending
from octavo.scheduler.landing import Landing
from octavo.scheduler.live_requests import LiveRequests
from octavo.scheduler.output import SampledToken, ScheduledSequence, SchedulerOutput
from octavo.scheduler.policy import Policy
from octavo.scheduler.scoring import score_prompts
from octavo.scheduler.seating import Seating
from octavo.scheduler.stopping import StopRule
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.sequence import NO_BLOCK, Sequence, SequenceStatus


class Scheduler:
    """Share steps and KV blocks among sequences, in the order of a policy.

    `running` is in that order. Who waits is admitted at the place where it belongs, and the last in
    order makes room for those before it; so the first always advances, and everything ends.

    Args:
        swap_pays: whether to move a preempted sequence's KV to host memory, given its number of
            blocks and of computed tokens, rather than to recompute it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCacheManager,
        policy: Policy,
        eos_token_ids: Collection[int],
        swap_pays: Callable[[int, int], bool],
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.policy = policy
        self.waiting = WaitingQueue(policy)
        self.seating = Seating(limits.max_num_seqs, policy)
        self.admission = Admission(limits, cache, self.waiting, self.seating, policy)
        self.stopping = StopRule(eos_token_ids, self.admission.max_num_tokens)
        self.num_swap_preemptions, self.num_recompute_preemptions = 0, 0
        self._swap_pays = swap_pays
        self._live = LiveRequests()
        self._ending = Ending(self._live, self.waiting, self.seating, cache, policy)
        places = (self.waiting, self.seating)
        self.adapters = AdapterSlots(limits.num_adapter_slots, *places, self._ending)
        self._beams = Beams(self._live, self.waiting, self.seating, cache, policy, self._ending)
        self._landing = Landing(cache, self.stopping, self._ending, self._beams)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that a step can schedule, in order."""
        return self.seating.running

    @property
    def restoring(self) -> dict[int, Sequence]:
        """Sequences whose KV is coming back, by transfer id; some may have ended meanwhile."""
        return self.seating.restoring

    @property
    def num_preemptions(self) -> int:
        """Times a sequence had to make room."""
        return self.num_swap_preemptions + self.num_recompute_preemptions

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs, or blocks are on their way."""
        return bool(self._live or self.restoring)

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over live sequences: running, restoring, then waiting, each in order."""
        seated = (s for s in self.seating if s.status is not SequenceStatus.FINISHED)
        return chain(seated, self.waiting)

    def check(self, sequence: Sequence) -> None:
        """Refuse what `add` would refuse now.

        Raises:
            InvalidRequest: a live request has the same id, the prompt is empty, or n is too large.
            PromptTooLong: the prompt and one token can never fit the context or the block pool.
            QueueFull: too much waits already.
        """
        if sequence.request_id in self._live:
            raise InvalidRequest(f"request id {sequence.request_id!r} is already in use")
        self.admission.check_possible(sequence)
        self.admission.check_queue(sequence)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            RequestError, QueueFull: as `check` does.
        """
        self.check(sequence)
        sequence.max_num_tokens = min(
            self.stopping.max_num_tokens(sequence), self.admission.room_of(sequence)
        )
        if sequence.params.beam_width > 1:
            self._beams.begin(sequence, self.stopping.ending_token_ids(sequence))
        self._live.add(sequence)
        self.policy.arrive(sequence)
        self.waiting.push(sequence)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plan one step and allocate its blocks.

        Mutates queues, statuses and block tables; `advance` moves the token counts of who runs.
        Other steps may be under way meanwhile.
        """
        ended = self._ending.end_overdue(now_s)
        loads = self.adapters.plan(now_s)
        budget, num_stages = self.limits.max_num_batched_tokens, self.limits.num_stages
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []

        running, index, place = self.running, 0, self._place_of_head()
        while budget:
            if index == place:
                place = self._place_of_head() if self._admit(index, preempted, now_s) else None
                continue
            if index == len(running):
                break
            sequence = running[index]
            num_computed = sequence.num_computed_tokens
            end = min(len(sequence.token_ids), sequence.max_num_tokens - 1, num_computed + budget)
            count = end - num_computed
            if not count or len(scheduled) * num_stages >= len(running):
                index += 1  # its last token is being drawn, or it is left to other stages
            elif end <= sequence.num_writable_slots or self.cache.allocate(sequence, end):
                scheduled.append(self._share(sequence, count))
                budget -= count
                index += 1
            elif self.restoring and index + 1 == len(running):
                index += 1  # those who are coming back rank lower, but cannot make room yet
            else:
                preempted.append(self.preempt(running[-1], now_s))

        who = (tuple(scheduled), tuple(preempted))
        copies, scored = self.cache.pop_copies(), score_prompts(scheduled)
        return SchedulerOutput(*who, copies, tuple(ended), scored, loads)

    def advance(self, output: SchedulerOutput) -> None:
        """Count a planned step's tokens as computed, once it is under way; forks begin."""
        self.cache.prefixes.launch()
        for prompt in output.scored:
            prompt.sequence.num_unscored_tokens -= len(prompt.token_ids)
        for sequence, count, draws in output.scheduled:
            sequence.num_computed_tokens += count
            sequence.num_unlanded_tokens += count
            sequence.num_steps_under_way += 1
            for fork in draws[1:]:
                self._begin(fork, sequence)

    def expect(self, drawing: Iterable[Sequence]) -> None:
        """Count a token that is drawn for each row of a step's logits as known, without its id."""
        for row, sequence in enumerate(drawing):
            sequence.expect_token(row)

    def update(
        self,
        output: SchedulerOutput,
        sampled: tuple[SampledToken, ...],
        now_s: float,
        scores: Iterable[TokenLogprobs] = (),
    ) -> list[TokenOutput]:
        """Take in what the oldest step under way has computed and drawn, one token a row of logits.

        `scores` has one for each token of `output.scored`. Mutates sequences; those that end give
        their blocks back at once. Nothing comes out of those that have ended since.
        """
        outputs = self._landing.land_scores(output, scores, now_s)
        outputs += self._landing.land(output, sampled, now_s)
        if not output.scheduled and not self.restoring and wait_for_others(self.running):
            for sequence in reversed(self.running[:]):  # who is first of all now comes in first
                self.preempt(sequence, now_s)
        return outputs

    def resume(self, transfer_ids: Iterable[int], now_s: float) -> None:
        """Let the sequences run whose blocks have come back from the host."""
        for transfer_id in transfer_ids:
            sequence = self.seating.arrive(transfer_id)
            self.cache.arrive(sequence)
            if sequence.status is SequenceStatus.FINISHED:
                self.cache.free(sequence)
            else:
                self._run(sequence, self.seating.place_of(sequence), now_s)

    def preempt(self, sequence: Sequence, now_s: float) -> Sequence:
        """Move a running sequence back to the queue, its KV to host memory or away.

        It keeps its tokens. Only the last running sequence keeps the order of the policy.
        """
        self.seating.leave(sequence)
        num_computed = sequence.num_computed_tokens
        # What a window has left behind need not be copied, but would be computed again.
        num_blocks = len(sequence.block_table) - sequence.block_table.count(NO_BLOCK)
        swaps = num_computed > 0 and self._swap_pays(num_blocks, num_computed)
        if swaps and self.cache.swap_out(sequence):
            sequence.status = SequenceStatus.SWAPPED
            self.num_swap_preemptions += 1
        else:
            self.cache.free(sequence)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
            self.num_recompute_preemptions += 1
        sequence.num_preemptions += 1
        sequence.clock.turn("preempted_s", now_s)
        self.waiting.push(sequence)
        return sequence

    def finish(
        self, request_id: str, reason: FinishReason, index: int | None = None
    ) -> list[Sequence]:
        """End a request from outside, or one of its answers, and free its blocks.

        Returns the sequences that were still live.
        """
        return self._ending.end_request(request_id, reason, index)

    def check_integrity(self) -> None:
        """Recount sequences, seats and blocks, and raise EngineError if any is lost or doubled."""
        self._live.check_integrity(self.sequences())
        self.adapters.check_integrity()
        self.seating.check_integrity()
        self.cache.check_integrity([*self.seating, *self.waiting])

    def _place_of_head(self) -> int | None:
        """Return the place among the running where who comes in next belongs, if anybody may."""
        head = self.admission.newcomer
        return None if head is None else self.seating.place_of(head)

    def _admit(self, index: int, preempted: list[Sequence], now_s: float) -> bool:
        """Admit who comes in next before `running[index]`; return whether it was admitted.

        Those after it make room if that is enough, last first.
        """
        sequence = self.admission.newcomer
        assert sequence is not None, "nobody may come in"
        if index == len(self.running) and sequence.num_seats > self.seating.num_free_seats:
            return False
        if sequence.num_steps_under_way:
            return False  # it had to make room, and what it was computing is not known yet
        while not self.admission.fits(sequence, prefix := self.cache.find_cached(sequence)):
            if not self.admission.could_fit(sequence, prefix, index):
                return False
            preempted.append(self.preempt(self.running[-1], now_s))
        self.waiting.remove(sequence)
        self.adapters.admit(sequence)
        transfer_id = self.cache.admit(sequence, prefix)
        if transfer_id is None:
            self._run(sequence, index, now_s)
        else:
            sequence.status = SequenceStatus.RESTORING
            sequence.clock.turn("preempted_s", now_s)
            self.seating.restore(sequence, transfer_id)
        return True

    def _run(self, sequence: Sequence, index: int, now_s: float) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.clock.turn("decode_s" if sequence.num_output_tokens else "prefill_s", now_s)
        self.seating.run(sequence, index)

    def _share(self, sequence: Sequence, count: int) -> ScheduledSequence:
        end = sequence.num_computed_tokens + count
        if end > sequence.num_served_tokens:  # what is recomputed was charged before
            self.policy.serve(sequence, end - sequence.num_served_tokens)
            sequence.num_served_tokens = end
        if count > 1:
            self.cache.prefixes.announce(sequence, end)
        draws: tuple[Sequence, ...] = (sequence,) if end == len(sequence.token_ids) else ()
        if draws and sequence.num_seats > 1:
            draws += tuple(sequence.fork(index) for index in range(1, sequence.num_seats))
        # What a named tuple's own constructor does, in half the time.
        return tuple.__new__(ScheduledSequence, (sequence, count, draws))

    def _begin(self, fork: Sequence, parent: Sequence) -> None:
        """Let a fork run beside its parent, which kept a seat for it."""
        self.cache.fork(parent, fork)
        self.seating.fork(parent, fork)
        fork.num_steps_under_way = 1
        fork.status = SequenceStatus.RUNNING
        self._live.add_fork(fork)
        self.policy.arrive(fork)
