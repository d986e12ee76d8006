"""The mixed workload: seeded prompts and output lengths, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_REQUESTS = 64
PROMPT_TOKENS = (16, 96, 512)
"""Least, median and most."""
OUTPUT_TOKENS = (8, 64, 256)
_SIGMA = 0.9
# Ids of ordinary text tokens in the demo model; control tokens lie below.
_FIRST_ID, _LAST_ID = 100, 49_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and how many tokens it must generate."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def mixed_workload(seed: int = 0, num_requests: int = NUM_REQUESTS) -> list[Job]:
    """Return jobs with log-normal prompt and output lengths."""
    random = np.random.default_rng(seed)
    prompts = _lengths(random, PROMPT_TOKENS, num_requests)
    outputs = _lengths(random, OUTPUT_TOKENS, num_requests)
    return [
        Job(random.integers(_FIRST_ID, _LAST_ID, size=prompt).tolist(), output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _lengths(random: np.random.Generator, bounds: tuple[int, int, int], count: int) -> list[int]:
    least, median, most = bounds
    drawn = random.lognormal(np.log(median), _SIGMA, size=count)
    lengths: list[int] = np.clip(np.round(drawn), least, most).astype(int).tolist()
    return lengths
