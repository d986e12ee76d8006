"""Time what requests pay for their sampling parameters: steps of a full batch of the demo model.

    python benchmarks/sampling_cost.py [--sequences 64] [--prompt-tokens 1000] [--rounds 7]

In turns, batches of as many sequences decode, each sequence with the same parameters; their prompts
begin alike, and are in the cache. Milliseconds a step, medians over all rounds, and the median over
rounds of the ratio to the greedy batch of the same round.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
from in_process import load_engine
from quiet import QuietWatch
from script_options import COUNT

from octavo.engine import Engine
from octavo.local.demo_model import demo_checkpoint
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "LICENSE"
BLOCK_SIZE = 16
FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "clauses": {"type": "array", "items": {"type": "string"}, "minItems": 100},
        "year": {"type": "integer"},
    },
    "required": ["title", "clauses", "year"],
    "additionalProperties": False,
}
"""Too long an answer to end while it is timed."""
GREEDY = "greedy"
KINDS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0},
    "top-k, top-p": FILTERS,
    "top-k, top-p, penalties": FILTERS | PENALTIES,
    "greedy, penalties": {"temperature": 0, **PENALTIES},
    "bias, allowed tokens": {
        "temperature": 0,
        "logit_bias": dict.fromkeys(range(1000, 1300), 1.0),
        "allowed_token_ids": list(range(1000, 40_000)),
    },
    "logprobs 0": {"temperature": 0, "logprobs": 0},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "logprobs 20, top-k, top-p": {**FILTERS, "logprobs": 20},
    "JSON schema": {"temperature": 0, "structured_outputs": {"json": SCHEMA}},
    "JSON schema, top-k, top-p": {**FILTERS, "structured_outputs": {"json": SCHEMA}},
}


def make_prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return token ids of text, the same but for the last one."""
    tokenizer = Tokenizer.load(str(demo_checkpoint()))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return [[*ids[: num_tokens - 1], ids[index]] for index in range(num_prompts)]


def time_steps(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Decode all prompts for as long as `params` say; return the median milliseconds of a step."""
    for index, prompt in enumerate(prompts):
        resolved = params.resolve(engine.info.room_behind(len(prompt)), 1)
        engine.add(Request(str(index), tuple(prompt), resolved))
    steps_ms = []
    while engine.has_unfinished:
        started_s = time.perf_counter()
        stats = engine.step().stats
        if stats.num_scheduled_tokens == len(prompts):
            steps_ms.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(steps_ms)


@click.command()
@click.option("--sequences", default=64, show_default=True, type=COUNT)
@click.option("--prompt-tokens", default=1000, show_default=True, type=COUNT)
@click.option("--steps", default=12, show_default=True, type=click.IntRange(min=2))
@click.option("--rounds", default=7, show_default=True, type=COUNT)
def main(sequences: int, prompt_tokens: int, steps: int, rounds: int) -> None:
    """Time steps with and without sampling parameters."""
    engine = load_engine(
        block_size=BLOCK_SIZE,
        max_num_seqs=sequences,
        num_kv_blocks=prompt_tokens // BLOCK_SIZE + 1 + sequences * (steps // BLOCK_SIZE + 3),
    )
    prompts = make_prompts(sequences, prompt_tokens)
    params = {
        kind: SamplingParams.from_mapping({**keys, "max_tokens": steps, "ignore_eos": True})
        for kind, keys in KINDS.items()
    }
    times_ms: dict[str, list[float]] = defaultdict(list)
    time_steps(engine, prompts, params[GREEDY])
    with QuietWatch() as watch:
        for _ in range(rounds):
            for kind, each in params.items():
                times_ms[kind].append(time_steps(engine, prompts, each))
    noise = "" if watch.is_valid else f"   NO CLAIM: others {watch.foreign_share:.0%} of CPU"
    click.echo(
        f"{f'{sequences} sequences of {prompt_tokens} tokens':32}{'ms':>8}{'ratio':>8}{noise}"
    )
    for kind, each_ms in times_ms.items():
        ratios = [ms / greedy_ms for ms, greedy_ms in zip(each_ms, times_ms[GREEDY], strict=True)]
        click.echo(f"{kind:32}{statistics.median(each_ms):8.2f}{statistics.median(ratios):8.2f}")


if __name__ == "__main__":
    main()
