"""The curve over the length of the context, of the engine alone: one sequence, and eight.

Eight sequences come at once; what a further token takes is measured when all of them have their
first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from benchmarks.curves import Curve, Line, Panel, Point
from benchmarks.in_process import draw_prompt, load_engine, make_request
from benchmarks.quiet import quietly

from octavo.engine import Engine

PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8000)
"""The demo model's context is 8,192: what is left holds what the first of eight generates
meanwhile."""
CONTEXT_TOKENS = 8192
BATCHES = (1, 8)
NUM_STEPS = 20
SHORT_TOKENS, NUM_SHORT_RUNS = 1024, 3
"""Prompts up to that length are played so many times."""


def over_context(quick: bool) -> Iterator[Point]:
    """Measure prompts of 128 to 8,000 tokens."""
    engine = load_engine(
        num_kv_blocks=max(BATCHES) * CONTEXT_TOKENS // 16 + 64,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        swap_space_bytes=0,
    )
    for num_tokens in PROMPT_TOKENS[:3] if quick else PROMPT_TOKENS:
        yield measure(engine, num_tokens)


def measure(engine: Engine, num_tokens: int) -> Point:
    """Play prompts of one length in each batch, until the machine was quiet meanwhile."""
    point: Point = {"tokens": num_tokens, "foreign_share": 0.0}
    num_runs = NUM_SHORT_RUNS if num_tokens <= SHORT_TOKENS else 1
    for batch in BATCHES:
        runs, watch = quietly(partial(play_runs, engine, batch, num_tokens, num_runs))
        first_s, step_s = (statistics.median(times) for times in zip(*runs, strict=True))
        point[f"first_token_{batch}_s"] = first_s
        point[f"step_{batch}_s"] = step_s
        point[f"tokens_per_s_{batch}"] = batch / step_s
        point["foreign_share"] = max(point["foreign_share"], watch.foreign_share)
    return point


def play_runs(
    engine: Engine, batch: int, num_tokens: int, num_runs: int
) -> list[tuple[float, float]]:
    """Play so many times, one after the other."""
    return [play(engine, batch, num_tokens) for _ in range(num_runs)]


def play(engine: Engine, batch: int, num_tokens: int) -> tuple[float, float]:
    """Return the mean time to the first token, and the median time of a step after all of them."""
    random = np.random.default_rng(num_tokens)
    started_s = time.perf_counter()
    requests = [
        make_request(draw_prompt(random, num_tokens), CONTEXT_TOKENS - num_tokens)
        for _ in range(batch)
    ]
    for request in requests:
        engine.add(request)
    first_s: dict[str, float] = {}
    while len(first_s) < batch:
        outputs = engine.step().outputs
        now_s = time.perf_counter() - started_s
        for output in outputs:
            first_s.setdefault(output.request_id, now_s)
    steps_s = [_time_step(engine) for _ in range(NUM_STEPS)]
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished:
        engine.step()
    return statistics.fmean(first_s.values()), statistics.median(steps_s)


def _time_step(engine: Engine) -> float:
    started_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - started_s


CONTEXT = Curve(
    "context",
    "tokens",
    "tokens of context",
    (
        Panel(
            "decode, tokens/s",
            (Line("tokens_per_s_1", "one sequence"), Line("tokens_per_s_8", "eight")),
        ),
        Panel(
            "ms a further token",
            (Line("step_1_s", "one sequence", 1e3, 1), Line("step_8_s", "eight", 1e3, 1)),
        ),
        Panel(
            "ms to the first token",
            (
                Line("first_token_1_s", "one sequence", 1e3),
                Line("first_token_8_s", "eight, mean", 1e3),
            ),
            is_log=True,
        ),
    ),
    over_context,
)
