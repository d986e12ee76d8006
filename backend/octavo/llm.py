"""The engine in the caller's own process: prompts in, whole answers out, no server.

For offline use, scripts and tests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine_choice import load_chosen
from octavo.errors import InvalidRequest, QueueFull, RequestError
from octavo.local.demo_model import resolve_model
from octavo.model.location import configured_checkpoint
from octavo.request import FinishReason, Request, SequenceTiming, TokenLogprobs, TokenOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduling_params import SchedulingParams
from octavo.text.bad_words import bad_words_token_ids
from octavo.text.output_text import OutputText
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; `token_ids` includes the token that ended it, `text` does if that was asked."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Of each token, if they were asked for."""
    finish_reason: FinishReason
    timing: SequenceTiming

    @property
    def cumulative_logprob(self) -> float:
        """Sum of its tokens' log-probabilities, if they were asked for, else 0."""
        return sum(first.logprob for first, *_ in self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt: n answers, of which the first is also here by itself."""

    prompt_token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of each prompt token, if they were asked for; None for the first, before which none is."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first answer."""
        return self.answers[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the first answer's tokens, if they were asked for."""
        return self.answers[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.answers[0].finish_reason


class LLM:
    """A model loaded for offline generation.

        LLM("demo").generate(["The capital of France is"], SamplingParams(max_tokens=8))

    Args:
        model: checkpoint directory, GGUF file, hub id, or `demo`.
        options: any option of `EngineConfig`, by name.

    Raises:
        ConfigError: the model or an option cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_mapping({**options, "model": resolve_model(model)})
        trust = config.trust_remote_code
        directory = configured_checkpoint(config)
        self.tokenizer = Tokenizer.load(config.tokenizer or str(directory), trust_remote_code=trust)
        self.engine = load_chosen(replace(config, model=str(directory)))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: SchedulingParams | Sequence[SchedulingParams] | None = None,
    ) -> list[Completion]:
        """Answer all prompts, batched, and return what came of each, in order.

        Args:
            prompts: texts or lists of token ids.
            params: one for all prompts, or one each.
            scheduling: one for all prompts, or one each.

        Raises:
            RequestError: a prompt or its parameters cannot be served, or a form not be followed;
                none is answered then.
            QueueFull: the prompts are more than the options let wait; none is answered then.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = _each("sampling", params, SamplingParams(), len(texts))
        places = _each("scheduling", scheduling, SchedulingParams(), len(texts))
        requests = list(map(self._make_request, texts, sampling, places))
        growing = {request.request_id: self._begin(request) for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_unfinished:
                for output in self.engine.step().outputs:
                    self._take(growing[output.request_id][output.index], output)
        finally:
            for request_id in growing:
                self.engine.abort(request_id)
        return [_whole(request, growing[request.request_id]) for request in requests]

    def _make_request(
        self, prompt: str | Sequence[int], params: SamplingParams, scheduling: SchedulingParams
    ) -> Request:
        arrival_s = time.monotonic()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        info = self.engine.info
        params.check_logprobs(len(ids), info.max_logprobs)
        return Request(
            str(next(self._ids)),
            tuple(ids),
            params.resolve(info.room_behind(len(ids)), info.default_max_tokens),
            arrival_s,
            scheduling.deadline_s(arrival_s),
            scheduling.priority,
            scheduling.tenant,
            scheduling.cache_salt,
            bad_words_token_ids(params.bad_words, self.tokenizer, info.eos_token_ids),
            info.encodes_prompt,
        )

    def _begin(self, request: Request) -> list[_Growing]:
        before, params = request.continued_token_ids, request.params
        return [_Growing(OutputText(self.tokenizer, before, params)) for _ in range(params.n)]

    def _take(self, answer: _Growing, output: TokenOutput) -> None:
        if isinstance(output.error, RequestError | QueueFull):
            raise output.error
        answer.take(output)
        if answer.finish_reason is not None and output.finish_reason is None:
            for last in self.engine.abort(output.request_id, FinishReason.STOP, output.index):
                answer.timing = last.timing


def _each(kind: str, given: T | Sequence[T] | None, default: T, num_prompts: int) -> list[T]:
    """Return parameters, one set for all prompts or one each, as one each."""
    if given is None:
        given = default
    each = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts have {len(each)} {kind} parameters")
    return each


def _whole(request: Request, answers: list[_Growing]) -> Completion:
    scored = None
    if request.params.prompt_logprobs is not None:
        scored = (None, *answers[0].prompt_logprobs)
    return Completion(request.prompt_token_ids, tuple(answer.whole() for answer in answers), scored)


@dataclass(slots=True)
class _Growing:
    """One answer while it grows."""

    output: OutputText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    timing: SequenceTiming | None = None

    def take(self, output: TokenOutput) -> None:
        """Add a step's tokens."""
        delta = self.output.push(output.token_ids, output.finish_reason)
        self.pieces.append(delta.text)
        self.token_ids += output.token_ids[: delta.num_tokens]
        self.logprobs += output.logprobs[: delta.num_tokens]
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.timing = delta.finish_reason, output.timing

    def whole(self) -> Answer:
        """Return the answer, which must have ended."""
        assert self.finish_reason is not None, "the answer has not ended"
        assert self.timing is not None, "a last output has no timing"
        return Answer(
            "".join(self.pieces),
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.finish_reason,
            self.timing,
        )
