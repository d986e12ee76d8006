"""Makers of sequences, of schedulers, and of a memory that knows what was written where."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from octavo.cache.block_copies import BlockPair
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import SequenceTiming, TokenLogprob, TokenLogprobs, TokenOutput
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import NO_BLOCK, Sequence

EOS = 0


class KVMemory:
    """Blocks of slots; a slot holds all that its KV depends on, chained into one number.

    It makes a step's copies and writes as an executor would, and finds every slot that a sequence
    reads while it holds something else than that sequence's own past.
    """

    def __init__(self, cache: KVCacheManager, window: int | None) -> None:
        self.block_size = cache.block_size
        self.window = window
        self.device: list[list[int]] = [[] for _ in range(cache.num_blocks)]
        self.host: list[list[int]] = [[] for _ in range(cache.num_host_blocks)]
        self.under_way: dict[int, tuple[BlockPair, ...]] = {}
        self.drawn: dict[Sequence, list[int]] = {}
        """What the device knows of pending tokens: their ids, in order."""

    def execute(self, output: SchedulerOutput, live: Iterable[Sequence]) -> None:
        """Make the copies, then write the scheduled tokens; swap-ins stay under way."""
        for source, target in output.copies.swap_out:
            self.host[target] = list(self.device[source])
        for source, target in output.copies.copies:
            self.device[target] = list(self.device[source])
        for swap_in in output.copies.swap_in:
            self.under_way[swap_in.transfer_id] = swap_in.pairs
            for _, target in swap_in.pairs:
                self.device[target] = []
        for sequence, _, _ in output.scheduled:
            self.check(sequence, sequence.num_computed_tokens)
        num_owners: dict[int, int] = {}
        for sequence in live:
            for block in sequence.block_table:
                num_owners[block] = num_owners.get(block, 0) + 1
        for sequence, count, _ in output.scheduled:
            self._write(sequence, sequence.num_computed_tokens + count, num_owners)
        for sequence, count, _ in output.scheduled:
            self.check(sequence, sequence.num_computed_tokens + count)
            self._check_window(sequence)

    def arrive(self, transfer_id: int) -> None:
        """Let a swap-in end."""
        for source, target in self.under_way.pop(transfer_id):
            self.device[target] = list(self.host[source])

    def check(self, sequence: Sequence, num_tokens: int) -> None:
        """Compare what the first `num_tokens` slots of its table hold with its own past."""
        past = self._chain(sequence)[:num_tokens]
        for first in range(0, num_tokens, self.block_size):
            block = sequence.block_table[first // self.block_size]
            expected = past[first : first + self.block_size]
            if block != NO_BLOCK:
                assert self.device[block][: len(expected)] == expected, (sequence, first)

    def _check_window(self, sequence: Sequence) -> None:
        first = 0 if self.window is None else sequence.num_computed_tokens - self.window + 1
        seen = sequence.block_table[max(0, first) // self.block_size :]
        assert NO_BLOCK not in seen, f"{sequence} misses blocks that its next token sees"

    def _write(self, sequence: Sequence, end: int, num_owners: dict[int, int]) -> None:
        past = self._chain(sequence)
        for position in range(sequence.num_computed_tokens, end):
            block = sequence.block_table[position // self.block_size]
            assert num_owners[block] == 1, f"{sequence} writes the shared block {block}"
            slots = self.device[block]
            del slots[position % self.block_size :]
            assert len(slots) == position % self.block_size, (sequence, position)
            slots.append(past[position])

    def _chain(self, sequence: Sequence) -> list[int]:
        link, past = hash(sequence.request.cache_salt), []
        named = sequence.token_ids[: sequence.num_named_tokens]
        for token_id in (*named, *self.drawn.get(sequence, ())):
            link = hash((link, token_id))
            past.append(link)
        return past


class Flight(NamedTuple):
    """A step that is launched, and what each of its rows draws."""

    output: SchedulerOutput
    drawn: list[int]


class SchedulerDriver:
    """A scheduler whose steps read as plain data; each step recounts and checks everything.

    Sequences go by their request's id, forks by `id.index`. Time stands still unless `now_s` is
    set, and what is swapped in arrives only when `arrive` is called.
    """

    def __init__(
        self, scheduler: Scheduler, memory: KVMemory, make_sequence: Callable[..., Sequence]
    ) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.memory = memory
        self.now_s = 0.0
        self.outputs: list[TokenOutput] = []
        """Of the last step, without their timing."""
        self.timings: dict[str, SequenceTiming] = {}
        """Of all that ended by themselves."""
        self.preempted: list[str] = []
        self.steps_ahead = 0
        """Steps that stay under way when `run` returns, unless it had nothing to run."""
        self.draws_at_once = scheduler.limits.num_stages == 1
        """Whether a step draws its tokens when it is launched; else when it lands."""
        self.under_way: deque[Flight] = deque()
        self.likely_after: Callable[[list[int]], TokenLogprobs] | None = None
        """What beams are told may follow their tokens."""
        self._make_sequence = make_sequence

    def add(self, name: str, prompt: int | list[int] = 5, **params) -> Sequence:
        sequence = self._make_sequence(name, prompt, **params)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self.now_s)
        self.preempted = _names(output.preempted)
        return output

    def run(self, output: SchedulerOutput, *token_ids: int) -> list[tuple[str, int, int]]:
        """Launch a planned step, whose rows draw `token_ids`, then 9, and land what must be.

        Returns (name, tokens, how many draw) of each sequence in the step.
        """
        self.launch(output, *token_ids)
        self.outputs = []
        while len(self.under_way) > (self.steps_ahead if output.scheduled else 0):
            self.outputs += self.land()
        return [(_name(sequence), count, len(draws)) for sequence, count, draws in output.scheduled]

    def launch(self, output: SchedulerOutput, *token_ids: int) -> None:
        self.memory.execute(output, self.scheduler.sequences())
        drawn = [*token_ids, *[9] * len(output.sampling)][: len(output.sampling)]
        self.scheduler.advance(output)
        if self.draws_at_once:
            self.scheduler.expect(output.sampling)
        self.under_way.append(Flight(output, drawn))
        for sequence, token_id in zip(output.sampling, drawn, strict=True):
            self.memory.drawn.setdefault(sequence, []).append(token_id)
        self.scheduler.check_integrity()

    def land(self) -> list[TokenOutput]:
        """Land the oldest step, and return what comes out of it, without timing."""
        output, drawn = self.under_way.popleft()
        if not self.draws_at_once:
            self.scheduler.expect(output.sampling)
        for sequence in output.sampling:
            del self.memory.drawn[sequence][0]
        sampled = tuple(map(self._sampled, output.sampling, drawn))
        scores = [
            (TokenLogprob(token_id, -1.0, 1),)
            for prompt in output.scored
            for token_id in prompt.token_ids
        ]
        outputs = self.scheduler.update(output, sampled, self.now_s, scores)
        for each in outputs:
            if each.timing is not None:
                self.timings[_name(each)] = each.timing
        self.scheduler.check_integrity()
        return [each._replace(timing=None) for each in outputs]

    def _sampled(self, sequence: Sequence, token_id: int) -> SampledToken:
        if sequence.search is None or self.likely_after is None:
            return SampledToken(token_id)
        known = sequence.token_ids[: sequence.num_named_tokens]
        return SampledToken(token_id, self.likely_after(known))

    def step(self, *token_ids: int) -> list[tuple[str, int, int]]:
        return self.run(self.plan(), *token_ids)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def arrive(self, *transfer_ids: int) -> None:
        """Let what is swapped in arrive, all by default, and those sequences run."""
        transfer_ids = transfer_ids or tuple(self.memory.under_way)
        for transfer_id in transfer_ids:
            self.memory.arrive(transfer_id)
        self.scheduler.resume(transfer_ids, self.now_s)
        self.scheduler.check_integrity()

    @property
    def running(self) -> list[str]:
        return _names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return _names(self.scheduler.waiting)


def _name(sequence: Sequence | TokenOutput) -> str:
    return sequence.request_id + (f".{sequence.index}" if sequence.index else "")


def _names(sequences: Iterable[Sequence]) -> list[str]:
    return [_name(sequence) for sequence in sequences]


@pytest.fixture(scope="session")
def make_sequence(make_request) -> Callable[..., Sequence]:
    """Make a waiting sequence; arguments as for `make_request`."""
    return lambda *args, **params: Sequence(make_request(*args, **params))


@pytest.fixture(scope="session")
def make_scheduler(make_sequence) -> Callable[..., SchedulerDriver]:
    """Make a driven scheduler over blocks of 4 tokens, whose end-of-text id is 0.

    Nothing is reused unless `prefix_caching`; with host blocks, `swap_pays` says what is swapped.
    Other options are those of `SchedulerLimits`.
    """

    def make(
        num_blocks: int = 100,
        policy: str = "fcfs",
        *,
        tenant_weights: str = "",
        block_size: int = 4,
        num_host_blocks: int = 0,
        prefix_caching: bool = False,
        window: int | None = None,
        swap_pays: Callable[[int, int], bool] = lambda num_blocks, num_tokens: True,
        **limits,
    ) -> SchedulerDriver:
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 400, **limits}
        cache = KVCacheManager(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching,
            window=window,
        )
        scheduler = Scheduler(
            SchedulerLimits(**values), cache, make_policy(policy, tenant_weights), (EOS,), swap_pays
        )
        return SchedulerDriver(scheduler, KVMemory(cache, window), make_sequence)

    return make
