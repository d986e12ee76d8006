"""Takes in what a step has computed and drawn: blocks are published, tokens named, answers ended.

Knows nothing of queues, seats or plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.errors import EngineError, InvalidRequest, OctavoError
from octavo.request import FinishReason, TokenLogprobs, TokenOutput
from octavo.scheduler.beams import Beams
from octavo.scheduler.ending import Ending, last_outputs
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.stopping import StopRule
from octavo.sequence import Sequence, SequenceStatus


class Landing:
    """The end of steps under way, the oldest first."""

    def __init__(
        self, cache: KVCacheManager, stopping: StopRule, ending: Ending, beams: Beams
    ) -> None:
        self._cache = cache
        self._stopping = stopping
        self._ending = ending
        self._beams = beams

    def land(
        self, output: SchedulerOutput, sampled: tuple[SampledToken, ...], now_s: float
    ) -> list[TokenOutput]:
        """Return what comes out of a step; nothing does of who has ended since it was launched."""
        self._cache.prefixes.land()
        outputs = list(output.ended)
        drawn = iter(sampled)
        for sequence, count, draws in output.scheduled:
            if not draws:
                self._settle(sequence, count)
            for each in draws:
                token = next(drawn)
                if token.token_id < 0:
                    outputs += self._fail(each, now_s)
                    continue
                self._settle(each, count)
                if each.status is SequenceStatus.FINISHED:
                    continue
                if each.search is None:
                    outputs.append(self._name(each, token, now_s))
                else:
                    outputs += self._beams.take(each.search, each, token, now_s)
        return outputs

    def land_scores(
        self, output: SchedulerOutput, scores: Iterable[TokenLogprobs], now_s: float
    ) -> list[TokenOutput]:
        """Return what a step says of the tokens of prompts; to be called before it lands."""
        outputs, rest = [], iter(scores)
        for sequence, _, token_ids in output.scored:
            logprobs = tuple(islice(rest, len(token_ids)))
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if all(first.rank for first, *_ in logprobs):
                outputs.append(TokenOutput(sequence.request_id, prompt_logprobs=logprobs))
                continue
            ended = self._ending.end_request(sequence.request_id, FinishReason.ERROR)
            outputs += last_outputs(ended, now_s, EngineError("the model's logits are not finite"))
        return outputs

    def _settle(self, sequence: Sequence, count: int) -> None:
        """Let a sequence own what a step has computed of it."""
        sequence.num_steps_under_way -= 1
        if sequence.status is not SequenceStatus.RUNNING:
            return  # its table is another by now, or none
        sequence.num_unlanded_tokens -= count
        num_landed = sequence.num_computed_tokens - sequence.num_unlanded_tokens
        if num_landed // self._cache.block_size > sequence.num_published_blocks:
            self._cache.publish(sequence)

    def _fail(self, sequence: Sequence, now_s: float) -> list[TokenOutput]:
        """End a request for which nothing can be drawn.

        Nobody reuses its KV if that is to blame. A request that may be at fault itself takes no
        prefix from others.
        """
        sequence.num_steps_under_way -= 1
        error = _why_nothing(sequence)
        if isinstance(error, EngineError):
            self._cache.prefixes.withdraw(sequence)
        ended = self._ending.end_request(sequence.request_id, FinishReason.ERROR)
        return last_outputs(ended, now_s, error)

    def _name(self, sequence: Sequence, token: SampledToken, now_s: float) -> TokenOutput:
        sequence.name_token(token.token_id)
        is_first = sequence.num_named_tokens == sequence.num_prompt_tokens + 1
        if is_first and sequence.status is SequenceStatus.RUNNING:
            sequence.clock.turn("decode_s", now_s)
        reason, timing = self._stopping.reason_to_end(sequence), None
        if reason is not None:
            self._ending.end(sequence, reason)
            timing = sequence.timing(now_s)
        logprobs = () if token.logprobs is None else (token.logprobs,)
        return TokenOutput(
            sequence.request_id, (token.token_id,), logprobs, reason, None, sequence.index, timing
        )


def _why_nothing(sequence: Sequence) -> OctavoError:
    """Return why no token can be drawn, as far as a sequence's parameters tell."""
    if sequence.grammar is not None and sequence.grammar.error is not None:
        return InvalidRequest(sequence.grammar.error)
    params = sequence.params
    num_output_tokens = sequence.num_named_tokens - sequence.num_prompt_tokens
    possible = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "structured_outputs": params.structured_outputs,
        "min_tokens": num_output_tokens < params.min_tokens,
    }
    keys = [key for key, rules_out in possible.items() if rules_out]
    if not keys:
        return EngineError("no token can be drawn: the model's logits are not finite")
    return InvalidRequest(
        f"no token can be drawn: {', '.join(keys)} must leave one "
        f"after {num_output_tokens} tokens, unless the model's logits are not finite"
    )
