"""The demo model's engine in this process: prompts in, counts and times out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.local.demo_model import demo_checkpoint
from octavo.request import Request, TokenOutput
from octavo.sampling_params import SamplingParams

# Ids of ordinary text tokens in the demo model; control tokens lie below.
_FIRST_ID, _LAST_ID = 100, 49_000
_names = itertools.count()


@dataclass(slots=True)
class Answer:
    """One request's answer; times are from when all of them were sent."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    num_cached_tokens: int = 0


def load_runner(**options: Any) -> tuple[EngineConfig, ModelRunner]:
    """Load the demo model with these engine options."""
    config = EngineConfig.from_mapping({"model": str(demo_checkpoint()), **options})
    return config, ModelRunner(config)


def load_engine(**options: Any) -> Engine:
    """Load the demo model's engine with these options, and compute something with it."""
    engine = Engine(*load_runner(**options))
    answer_all(engine, [[_FIRST_ID] * 8], 2)
    return engine


def answer_all(engine: Engine, prompts: Iterable[list[int]], num_tokens: int) -> list[Answer]:
    """Send all prompts at once and run until each has `num_tokens` tokens."""
    answers: dict[str, Answer] = {}
    started_s = time.monotonic()
    for prompt in prompts:
        request = make_request(prompt, num_tokens)
        answers[request.request_id] = Answer(prompt)
        engine.add(request)
    while engine.has_unfinished:
        for output in engine.step().outputs:
            _take(answers[output.request_id], output, time.monotonic() - started_s)
    return list(answers.values())


def make_request(prompt: list[int], num_tokens: int) -> Request:
    """Return a greedy request under a new name."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    return Request(str(next(_names)), tuple(prompt), params, time.monotonic())


def draw_prompt(random: np.random.Generator, num_tokens: int) -> list[int]:
    """Return random tokens; in nobody's cache, then."""
    prompt: list[int] = random.integers(_FIRST_ID, _LAST_ID, size=num_tokens).tolist()
    return prompt


def _take(answer: Answer, output: TokenOutput, now_s: float) -> None:
    if not answer.token_ids:
        answer.first_token_s = now_s
    answer.token_ids += output.token_ids
    if output.timing is not None:
        answer.num_cached_tokens = output.timing.num_cached_tokens
