"""Sequences that are beams of a search: held until all have candidates, then formed anew.

A beam never has more than one token that is not computed, and that one pending until the search
names it: so nobody schedules it meanwhile, wherever it stands. What candidates are worth is not
known here, nor are steps and plans.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from octavo.beam_search import BeamRules, BeamSearch, Continuation
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import FinishReason, TokenOutput
from octavo.scheduler.ending import Ending
from octavo.scheduler.live_requests import LiveRequests
from octavo.scheduler.output import SampledToken
from octavo.scheduler.policy import Policy
from octavo.scheduler.seating import Seating
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.sequence import Sequence, SequenceStatus


class Beams:
    """The beams of all requests of one scheduler."""

    def __init__(
        self,
        live: LiveRequests,
        waiting: WaitingQueue,
        seating: Seating,
        cache: KVCacheManager,
        policy: Policy,
        ending: Ending,
    ) -> None:
        self._live = live
        self._waiting = waiting
        self._seating = seating
        self._cache = cache
        self._policy = policy
        self._ending = ending

    def begin(self, sequence: Sequence, ending_token_ids: frozenset[int]) -> None:
        """Let a new sequence, whose `max_num_tokens` is set, and its forks be beams of a search."""
        params = sequence.params
        num_logprobs = params.logprobs or 0
        rules = BeamRules(
            params.beam_width,
            params.length_penalty,
            ending_token_ids,
            params.min_tokens,
            sequence.max_num_tokens - sequence.num_prompt_tokens,
            num_logprobs,
        )
        sequence.search = BeamSearch(rules)
        sequence.num_logprobs = max(rules.num_candidates, num_logprobs)
        sequence.needs_names = True
        sequence.max_num_tokens = sequence.num_tokens + 1

    def take(
        self, search: BeamSearch, beam: Sequence, token: SampledToken, now_s: float
    ) -> list[TokenOutput]:
        """Take what may follow a beam; return the answers if the search of its request is over."""
        if beam.num_output_tokens == 1 and beam.status is SequenceStatus.RUNNING:
            beam.clock.turn("decode_s", now_s)
        assert token.logprobs is not None, "a beam draws without candidates"
        if not search.offer(beam.index, token.logprobs):
            return []
        beams = {each.index: each for each in self._live.sequences_of(beam.request_id)}
        continuations = search.advance()
        if not continuations:
            return self._end(beams, search, now_s)
        for continuation in continuations:
            if continuation.slot != continuation.parent:
                self._branch(beams, continuation)
        for slot in beams.keys() - {each.slot for each in continuations}:
            self._ending.end(beams[slot], FinishReason.ABORT)
        for slot, parent, token_id in continuations:
            if slot == parent:
                _go_on(beams[parent], token_id)
        return []

    def _branch(self, beams: dict[int, Sequence], continuation: Continuation) -> None:
        """Put a fork of a beam in the place of one that ends, if there is one.

        It shares what its parent has computed if it can run at once; else it waits, to compute it.
        """
        slot, parent, token_id = continuation
        source, former = beams[parent], beams.get(slot)
        fork = source.fork(slot)
        place = None
        if former is not None:
            if former.status is SequenceStatus.RUNNING:
                place = self._seating.running.index(former)
            self._ending.end(former, FinishReason.ABORT)
        _go_on(fork, token_id)
        self._live.add_fork(fork)
        self._policy.arrive(fork)
        if place is not None and _is_computed(source):
            self._cache.fork(source, fork)
            fork.status = SequenceStatus.RUNNING
            self._seating.run(fork, place)
        else:
            fork.num_preemptions += 1  # it has been running, as its parent
            self._waiting.push(fork)
        beams[slot] = fork

    def _end(
        self, beams: dict[int, Sequence], search: BeamSearch, now_s: float
    ) -> list[TokenOutput]:
        """End all beams, and return the best answers, each as one output."""
        for beam in beams.values():
            self._ending.end(beam, FinishReason.STOP)
        first = min(beams.values(), key=lambda beam: beam.index)
        timing = first.timing(now_s)
        wants_logprobs = first.params.logprobs is not None
        return [
            TokenOutput(
                first.request_id,
                answer.token_ids,
                answer.logprobs if wants_logprobs else (),
                answer.finish_reason,
                index=index,
                timing=timing,
            )
            for index, answer in enumerate(search.best(first.params.n))
        ]


def wait_for_others(running: List[Sequence]) -> bool:
    """Return whether all who run are beams that wait for beams which cannot come in."""
    return bool(running) and all(
        beam.search is not None and beam.num_computed_tokens == beam.max_num_tokens - 1
        for beam in running
    )


def _go_on(beam: Sequence, token_id: int) -> None:
    """Name a beam's pending token, and let it be computed and one more be drawn."""
    beam.name_token(token_id)
    beam.max_num_tokens += 1


def _is_computed(beam: Sequence) -> bool:
    """Return whether a beam has blocks with all it knows, and no step writes to them."""
    is_whole = beam.num_computed_tokens == beam.num_tokens - 1
    is_running = beam.status is SequenceStatus.RUNNING
    return is_running and is_whole and not beam.num_steps_under_way
