"""The engine: requests in, tokens out, one step at a time.

Owns the scheduler, the KV cache and the model runner; everything mutable belongs to the one thread
that calls it. Knows nothing of threads, the server or text.
"""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.executor.model_runner import ModelRunner
from octavo.request import EngineInfo, FinishReason, Request, StepOutput, StepStats, TokenOutput
from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.sampler import sample
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits
from octavo.sequence import Sequence


class Runner(Protocol):
    """What the engine needs of a model on a device."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_blocks: int

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """Return logits [num_samples, vocab_size] float32, in the order of `output.sampling`."""


class Engine:
    """Schedule, execute, sample, update."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self.info = EngineInfo(
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=config.block_size,
            vocab_size=runner.vocab_size,
            eos_token_ids=tuple(runner.eos_token_ids),
            default_max_tokens=config.default_max_tokens,
        )
        limits = SchedulerLimits(
            config.max_num_seqs, config.max_num_batched_tokens, runner.max_model_len
        )
        cache = KVCacheManager(runner.num_blocks, config.block_size)
        self.scheduler = Scheduler(limits, cache, runner.eos_token_ids)
        self._runner = runner
        self._stats = StepStats(num_blocks=runner.num_blocks, num_free_blocks=runner.num_blocks)

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Load the model that `config` names.

        Raises:
            ConfigError: the checkpoint, the device or the memory cannot be served.
        """
        return cls(config, ModelRunner(config))

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request whose parameters are resolved.

        Raises:
            RequestError: it can never run; nothing else notices.
        """
        vocab_size = self.info.vocab_size
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"the prompt holds token id {token_id} but ids must be in [0, {vocab_size - 1}]"
                )
        self.scheduler.add(Sequence(request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free its blocks; nothing more is output for it.

        Returns whether it was still live.
        """
        return self.scheduler.finish(request_id, reason) is not None

    def step(self) -> StepOutput:
        """Run one step of the model over the sequences that the scheduler picks.

        There must be unfinished requests.
        """
        scheduled = self.scheduler.schedule()
        logits = self._runner.execute(scheduled)
        batch = build_sampling_batch(scheduled.sampling, self.scheduler.ending_token_ids)
        sampled = sample(logits, batch)
        outputs = self.scheduler.update(scheduled, sampled)
        return StepOutput(tuple(outputs), self._count(scheduled, outputs))

    def stats(self) -> StepStats:
        """Return the totals, with queues and blocks as they are now and no tokens scheduled."""
        return self._count(SchedulerOutput(()), [])

    def check_integrity(self) -> None:
        """Recount every block against the live sequences.

        Raises:
            EngineError: blocks are leaked, shared or free while owned.
        """
        self.scheduler.check_integrity()

    def _count(self, scheduled: SchedulerOutput, outputs: list[TokenOutput]) -> StepStats:
        last, scheduler = self._stats, self.scheduler
        num_generated = sum(len(output.token_ids) for output in outputs)
        self._stats = StepStats(
            step=last.step + bool(scheduled.scheduled),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.cache.num_blocks,
            num_free_blocks=scheduler.cache.num_free_blocks,
            num_scheduled_tokens=scheduled.num_scheduled_tokens,
            num_computed_tokens_total=last.num_computed_tokens_total
            + scheduled.num_scheduled_tokens,
            num_generated_tokens_total=last.num_generated_tokens_total + num_generated,
            num_preemptions_total=scheduler.num_preemptions,
        )
        return self._stats
