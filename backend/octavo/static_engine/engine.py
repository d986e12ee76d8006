"""The engine of the traditional mode: an `Engine` that runs batch after batch.

All that waits when a batch ends makes up the next, as far as there is room; nobody joins a batch
that runs. Everything else is as in continuous batching, and done by the same code. Knows nothing of
threads, the server or text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.engine import Engine, StepStart
from octavo.errors import EngineError, InvalidRequest, PromptTooLong
from octavo.request import FinishReason, Request, StepOutput, TokenOutput
from octavo.scheduler.ending import last_outputs
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.whole_batches import BatchRule
from octavo.static_engine.generation import LacksMemory
from octavo.static_engine.refusals import MODE, check_beam_width, check_options
from octavo.static_engine.runner import StaticRunner
from octavo.static_engine.trial import BatchKind

#: Bytes of the logits of one prompt whose tokens are scored: they are all there at once.
MOST_LOGITS_BYTES = 1 << 30
_MOST_TOKENS_A_STEP = 2**31 - 1
#: Requests sent at once reach the engine apart, and who comes late waits for a whole batch: eight
#: over gRPC began as one and seven, and with this pause, less than a model's step, as eight.
_COMPANY_S = 0.005
#: For so long what lacked memory is taken to lack it still.
_MEMORY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Refused:
    """A batch that found not enough memory to begin."""

    num_rows: int
    longest: int
    until_s: float

    def is_within(self, num_rows: int, longest: int, now_s: float) -> bool:
        """Return whether another would find no more, for it is no smaller in any way."""
        return now_s < self.until_s and num_rows >= self.num_rows and longest >= self.longest


class StaticEngine(Engine):
    """An engine whose requests run in batches from beginning to end.

    Args:
        config: the options.
        clock: as an `Engine` has it.

    Raises:
        ConfigError: the model cannot be served so, or an option has no meaning in this mode.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        check_options(config)
        self._static_runner = runner = StaticRunner(config)
        single = runner.batch_kind is BatchKind.SINGLE
        own = replace(
            config,
            enable_prefix_caching=False,
            max_num_seqs=1 if single else config.max_num_seqs,
            # A prompt is computed whole, and all of a batch together.
            max_num_batched_tokens=_MOST_TOKENS_A_STEP,
        )
        rule = BatchRule(equal_lengths=runner.batch_kind is not BatchKind.PADDED)
        super().__init__(own, runner, clock, rule)
        self._refused: _Refused | None = None
        if not single:
            self.company_s = _COMPANY_S
        if runner.is_encoder_decoder:
            self.info = replace(self.info, max_model_len=runner.max_prompt_len, encodes_prompt=True)

    @classmethod
    def load(cls, config: EngineConfig) -> StaticEngine:
        """Load the model that `config` names, as the class itself does."""
        return cls(config)

    def add(self, request: Request) -> None:
        """Queue a request, as `Engine` does; what the mode cannot do is refused by name."""
        self._check(request)
        super().add(request)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> tuple[TokenOutput, ...]:
        """End a request or one of its answers; with its last, a batch gives back what it holds."""
        ended = super().abort(request_id, reason, index)
        self._leave_if_over()
        return ended

    def step(self) -> StepOutput:
        """Begin a batch, or compute a token of each that still runs in it."""
        output = super().step()
        self._leave_if_over()
        return output

    def _start(self, scheduled: SchedulerOutput) -> StepStart:
        if self._is_known_too_large(scheduled):
            return self._start(self._halve(scheduled))
        try:
            return super()._start(scheduled)
        except LacksMemory as error:
            reason = str(error)
        return self._start(self._shrink(scheduled, reason))

    def _is_known_too_large(self, scheduled: SchedulerOutput) -> bool:
        rows = [each.sequence for each in scheduled.scheduled]
        if self._refused is None or len(rows) < 2 or rows[0].num_computed_tokens:
            return False
        longest = max(row.num_tokens for row in rows)
        return self._refused.is_within(len(rows), longest, self._clock())

    def _halve(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Return a step in which half of a batch begins; the others go back to the queue."""
        num_kept, now_s = len(scheduled.scheduled) // 2, self._clock()
        for each in reversed(scheduled.scheduled[num_kept:]):
            self.scheduler.preempt(each.sequence, now_s)
        return replace(scheduled, scheduled=scheduled.scheduled[:num_kept])

    def _shrink(self, scheduled: SchedulerOutput, reason: str) -> SchedulerOutput:
        """Return a step that takes less memory than one that there was not enough for.

        A batch that begins is halved; one prompt alone, or a batch that has begun, ends with an
        error.
        """
        rows, now_s = [each.sequence for each in scheduled.scheduled], self._clock()
        if len(rows) > 1 and not rows[0].num_computed_tokens:
            longest = max(row.num_tokens for row in rows)
            logger.warning(
                "a batch of %d prompts of up to %d tokens takes more memory than there is (%s); "
                "half of them begin, and for %g s so of all such batches",
                *(len(rows), longest, reason, _MEMORY_S),
            )
            self._refused = _Refused(len(rows), longest, now_s + _MEMORY_S)
            return self._halve(scheduled)
        logger.error("a batch of %d ends for want of memory: %s", len(rows), reason)
        ended = list(scheduled.ended)
        for row in rows:
            error = EngineError(
                f"there is not enough memory for a batch of {len(rows)} whose longest text has "
                f"{max(each.num_tokens for each in rows):,} tokens; send a shorter prompt, or "
                "lower max_num_seqs or max_model_len"
            )
            ended += last_outputs(
                self.scheduler.finish(row.request_id, FinishReason.ERROR), now_s, error
            )
        return replace(scheduled, scheduled=(), scored=(), ended=tuple(ended))

    def _leave_if_over(self) -> None:
        if not self.scheduler.running:
            self._static_runner.leave()

    def _check(self, request: Request) -> None:
        params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
        check_beam_width(params.beam_width)
        if self.info.encodes_prompt:
            self._check_encoded(request)
        elif params.prompt_logprobs is not None:
            needed = num_prompt_tokens * self.info.vocab_size * 4
            if needed > MOST_LOGITS_BYTES:
                raise InvalidRequest(
                    f"prompt_logprobs of {num_prompt_tokens:,} prompt tokens takes {needed:,} "
                    f"bytes of logits but at most {MOST_LOGITS_BYTES:,} are allowed {MODE}; "
                    "shorten the prompt"
                )

    def _check_encoded(self, request: Request) -> None:
        params, most = request.params, self.info.max_prompt_tokens
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs must be absent where the prompt is an encoder's input: no token "
                "of it is predicted"
            )
        if len(request.prompt_token_ids) > most:
            raise PromptTooLong(
                f"prompt has {len(request.prompt_token_ids):,} tokens but the encoder takes "
                f"{most:,}; shorten it or raise max_model_len"
            )
        room = self.info.room_behind(len(request.prompt_token_ids))
        if (params.max_tokens or 0) > room:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens:,} but the decoder has room for {room:,}"
            )
