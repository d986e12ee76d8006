"""The engine: requests in, tokens out, one step at a time.

Owns the scheduler, the KV cache and the model runner; everything mutable belongs to the one thread
that calls it. Knows nothing of threads, the server or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from octavo.adapter import find_adapter
from octavo.cache.block_copies import BlockCopies
from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.errors import EngineDead
from octavo.executor.model_runner import ModelRunner
from octavo.executor.parallel.rank_zero import RankZero
from octavo.executor.prompt_scores import PromptScores
from octavo.executor.runner import Runner
from octavo.executor.stages import num_due
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.vocabulary import load_vocabulary
from octavo.grammar_gate import GrammarGate
from octavo.inspection import Inspection, inspect_scheduler
from octavo.request import EngineInfo, FinishReason, Request, StepOutput, StepStats, TokenOutput
from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.grammar_masks import GrammarMasks
from octavo.sampling.processor_rows import MaskedRows
from octavo.sampling.sampler import DrawnTokens, sample
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.ending import last_outputs
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.whole_batches import BatchRule
from octavo.sequence import Sequence
from octavo.step_counter import StepCounter

#: A step that has nothing to do but to wait for a grammar or an adapter waits at most this long, so
#: that aborts and deadlines are heeded meanwhile.
LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class StepStart:
    """A step that computes; its logits hold once it is finished."""

    scheduled: SchedulerOutput
    masks: Future[MaskedRows] | None
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose tokens are drawn, on the device at least."""

    scheduled: SchedulerOutput
    drawn: DrawnTokens
    scores: PromptScores | None


class Engine:
    """Schedule, execute, sample, update.

        steps_ahead 0   launch 1 ──────── land 1 ─ launch 2 ──────── land 2 ─ …
              device             step 1                     step 2
        steps_ahead 1   launch 1 ─ launch 2 ─ land 1 ─ launch 3 ─ land 2 ─ launch 4 ─ …
              device             step 1 ───────── step 2 ──────── step 3 ──────────
        num_stages 2    start 1 ─ start 2 ─ finish 1, land 1 ─ start 3 ─ finish 2, land 2 ─ …
              stage 0     step 1 ── step 2 ────────────────────── step 3 ────────
              stage 1               step 1 ──────────────────────── step 2 ──────

    `clock` gives the time in seconds, of the same clock as the requests' deadlines. With a
    `batch_rule` requests run in batches that nobody joins later.
    """

    company_s = 0.0
    """How long who comes to an idle engine waits for others: no time, for they may join later."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        batch_rule: BatchRule | None = None,
    ) -> None:
        self.config = config
        self.info = EngineInfo(
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=config.block_size,
            vocab_size=runner.vocab_size,
            eos_token_ids=tuple(runner.eos_token_ids),
            default_max_tokens=config.default_max_tokens,
            max_num_seqs=config.max_num_seqs,
            num_host_blocks=runner.num_host_blocks,
            max_logprobs=config.max_logprobs,
            computes_on_host=runner.computes_on_host,
            adapters=tuple(runner.adapters),
        )
        self.scheduler = _make_scheduler(config, runner, batch_rule)
        self._gate = _make_gate(config, runner)
        self._masks = GrammarMasks()
        self._runner = runner
        self._clock = clock
        self._copies = BlockCopies()
        """Those of a step that is being launched."""
        self._started: deque[StepStart] = deque()
        self._under_way: deque[_Flight] = deque()
        self._drawn: torch.Tensor | None = None
        """Token ids that the last launched step draws, on the device."""
        self._counter = StepCounter(self.scheduler, self._gate)

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Load the model that `config` names, on as many ranks as it says.

        Raises:
            ConfigError: the checkpoint, the device or the memory cannot be served.
            EngineError: a rank in another process is gone before it is loaded.
        """
        return cls(config, ModelRunner(config) if config.num_ranks == 1 else RankZero(config))

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do, be it to wait for a grammar or to tell of an end."""
        is_untold = any(flight.scheduled.ended for flight in self._under_way)
        return self.scheduler.has_unfinished or bool(self._gate or self._started) or is_untold

    def add(self, request: Request) -> None:
        """Queue a request whose parameters are resolved; nothing else notices a refusal.

        Raises:
            RequestError: it can never run.
            QueueFull: too much waits already.
        """
        self._gate.check_id(request.request_id)
        adapter = find_adapter(request.params.lora_name, self._runner.adapters)
        request.check_vocabulary(self.info.vocab_size)
        sequence = Sequence(request, adapter=adapter)
        if request.params.structured_outputs is None:
            self.scheduler.add(sequence)
            return
        self.scheduler.check(sequence)
        self._gate.add(sequence)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> tuple[TokenOutput, ...]:
        """End a request, or one of its answers, and free its blocks; no step outputs more of it.

        Returns a last output, without tokens, of each answer that was still live.
        """
        ended = self._gate.end(request_id, reason)
        ended += self.scheduler.finish(request_id, reason, index)
        return tuple(last_outputs(ended, self._clock()))

    def step(self) -> StepOutput:
        """Start a step over the sequences that the scheduler picks, and land those before it.

        There must be unfinished requests. The step itself is landed too where the device computes
        while the host waits, or where what it draws must be known before the next one is planned.

        Raises:
            EngineDead: an earlier step failed when blocks had to be copied, and may not have been.
        """
        if self._copies:
            raise EngineDead("an earlier step failed while it copied blocks; load the model again")
        started_s = self._clock()
        outputs = self._let_in()
        outputs += self._meet_adapters()
        self.scheduler.resume(self._runner.arrived(), self._clock())
        scheduled = self.scheduler.schedule(self._clock())
        self._started.append(self._start(scheduled))
        compute = [bool(start.scheduled.scheduled) for start in self._started]
        for _ in range(num_due(compute, self._runner.num_stages)):
            self._under_way.append(self._draw(self._started.popleft()))
        while len(self._under_way) > self._num_ahead(scheduled):
            outputs += self._land(self._under_way.popleft())
        num_tokens = sum(len(output.token_ids) for output in outputs)
        stats = self._counter.count(scheduled, num_tokens, self._clock() - started_s)
        return StepOutput(tuple(outputs), stats)

    def _let_in(self) -> list[TokenOutput]:
        """Queue requests whose grammars are compiled; wait for one if there is nothing else."""
        timeout_s = 0.0 if self.scheduler.has_unfinished else LOOK_AGAIN_S
        return self._gate.let_in(self.scheduler.add, self._clock(), timeout_s)

    def _meet_adapters(self) -> list[TokenOutput]:
        """Let in who waits for adapters that have come; wait for one if there is nothing else."""
        adapters = self.scheduler.adapters
        is_idle = adapters.is_waited_for and not (self._started or self._under_way or self._gate)
        arrivals = self._runner.arrived_adapters(LOOK_AGAIN_S if is_idle else 0.0)
        return adapters.arrive(arrivals, self._clock())

    def _start(self, scheduled: SchedulerOutput) -> StepStart:
        self._copies = scheduled.copies
        masks = self._masks.start(scheduled.sampling)
        logits = self._runner.execute(scheduled, self._drawn)
        self._copies = BlockCopies()
        self.scheduler.advance(scheduled)
        return StepStart(scheduled, masks, logits)

    def _draw(self, start: StepStart) -> _Flight:
        self._runner.finish()
        scores = self._runner.pop_scores() if start.scheduled.scored else None
        sampling = start.scheduled.sampling
        batch = build_sampling_batch(
            sampling,
            self.scheduler.stopping.ending_token_ids,
            None if start.masks is None else start.masks.result(),
        )
        drawn = sample(start.logits, batch)
        self._drawn = drawn.token_ids
        self.scheduler.expect(sampling)
        return _Flight(start.scheduled, drawn, scores)

    def _num_ahead(self, scheduled: SchedulerOutput) -> int:
        """Return how many drawn steps may be under way, after this one, meanwhile."""
        num_ahead = self._runner.steps_ahead if scheduled.scheduled else 0
        return 0 if num_ahead and any(s.needs_names for s in scheduled.sampling) else num_ahead

    def _land(self, flight: _Flight) -> list[TokenOutput]:
        self._runner.wait()
        scores = () if flight.scores is None else flight.scores.wait()
        sampled = flight.drawn.tokens()
        return self.scheduler.update(flight.scheduled, sampled, self._clock(), scores)

    def stats(self) -> StepStats:
        """Return the totals, with queues and blocks as they are now and no tokens scheduled."""
        return self._counter.count()

    def inspect(self) -> Inspection:
        """Return what queues and blocks look like now; changes nothing."""
        return inspect_scheduler(self.scheduler, self._clock())

    @property
    def connections(self) -> tuple[Connection, ...]:
        """To processes that take part; see Runner."""
        return self._runner.connections

    def check_processes(self) -> None:
        """Raise EngineError if a process that takes part is gone."""
        self._runner.check_processes()

    def check_integrity(self) -> None:
        """Recount every block against the live sequences.

        Raises:
            EngineError: blocks are leaked, shared or free while owned.
        """
        self.scheduler.check_integrity()


def _make_gate(config: EngineConfig, runner: Runner) -> GrammarGate:
    tokenizer, eos_token_ids = config.tokenizer or config.model, tuple(runner.eos_token_ids)
    compiler = GrammarCompiler(lambda: load_vocabulary(tokenizer, eos_token_ids))
    return GrammarGate(compiler, config.max_num_queued_requests)


def _make_scheduler(
    config: EngineConfig, runner: Runner, batch_rule: BatchRule | None
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        num_stages=runner.num_stages,
        num_adapter_slots=runner.num_adapter_slots,
        batch_rule=batch_rule,
    )
    cache = KVCacheManager(
        runner.num_blocks,
        config.block_size,
        num_host_blocks=runner.num_host_blocks,
        prefix_caching=config.enable_prefix_caching,
        window=runner.window,
    )
    policy = make_policy(config.scheduling_policy, config.tenant_weights)
    swap_pays = {
        "auto": runner.costs.prefers_swap,
        "swap": lambda num_blocks, num_tokens: True,
        "recompute": lambda num_blocks, num_tokens: False,
    }[config.preemption_mode]
    return Scheduler(limits, cache, policy, runner.eos_token_ids, swap_pays)
