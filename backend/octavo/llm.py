"""The engine in the caller's own process: prompts in, whole answers out, no server.

For offline use, scripts and tests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import InvalidRequest
from octavo.local.demo_model import resolve_model
from octavo.model.loader import checkpoint_directory
from octavo.request import FinishReason, Request, TokenOutput
from octavo.sampling_params import SamplingParams
from octavo.text.output_text import OutputText
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer; `token_ids` includes the token that ended it, `text` does not."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


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
        directory = str(checkpoint_directory(resolve_model(model)))
        config = EngineConfig.from_mapping({**options, "model": directory})
        self.tokenizer = Tokenizer.load(config.tokenizer or directory)
        self.engine = Engine.load(config)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer all prompts, batched, and return the answers in order.

        Args:
            prompts: texts or lists of token ids.
            params: one for all prompts, or one each.

        Raises:
            RequestError: a prompt or its parameters cannot be served; none is answered then.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(texts)
        else:
            each = list(params)
        if len(each) != len(texts):
            raise InvalidRequest(f"{len(texts)} prompts have {len(each)} sampling parameters")
        answers: dict[str, _Answer] = {}
        try:
            for prompt, wanted in zip(texts, each, strict=True):
                answer = self._add(prompt, wanted)
                answers[answer.request.request_id] = answer
            while self.engine.has_unfinished:
                for output in self.engine.step().outputs:
                    self._take(answers[output.request_id], output)
        finally:
            for request_id in answers:
                self.engine.abort(request_id)
        return [answer.completion() for answer in answers.values()]

    def _add(self, prompt: str | Sequence[int], params: SamplingParams) -> _Answer:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        info = self.engine.info
        resolved = params.resolve(len(ids), info.max_num_tokens, info.default_max_tokens)
        request = Request(str(next(self._ids)), tuple(ids), resolved, time.monotonic())
        self.engine.add(request)
        return _Answer(request, OutputText(self.tokenizer, ids, resolved))

    def _take(self, answer: _Answer, output: TokenOutput) -> None:
        if answer.take(output) and output.finish_reason is None:
            self.engine.abort(output.request_id, FinishReason.STOP)


@dataclass(slots=True)
class _Answer:
    """One answer while it grows."""

    request: Request
    text: OutputText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, output: TokenOutput) -> bool:
        """Add a step's tokens; return whether the answer is whole."""
        delta = self.text.push(output.token_ids, output.finish_reason)
        self.pieces.append(delta.text)
        self.token_ids += output.token_ids[: delta.num_tokens]
        self.logprobs += output.logprobs[: delta.num_tokens]
        self.finish_reason = delta.finish_reason
        return delta.finish_reason is not None

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"{self.request.request_id} has not ended"
        return Completion(
            self.request.prompt_token_ids,
            "".join(self.pieces),
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.finish_reason,
        )
