"""Measure what prefix caching spares: the same requests with and without it, in turns, in one run.

    python benchmarks/prefix.py --rounds 3

Runs the demo model's engine in this process, on three scenarios:

system prompt   64 requests at once share 512 tokens and go on with 24 to 40 of their own
chat            4 conversations of 6 turns; each prompt is all that was said, and 32 new tokens
working set     12 documents of 512 tokens, asked about one after the other, twice, where the
                device holds 7; the second time counts

The last compares a cache on the device alone with one that has host memory behind it. Tokens are
counted and always printed. Times are printed only of rounds in which other processes took at most
5 % of the CPU; a round is repeated up to 3 times for that. Times are until the first token, from
when all requests of a batch were sent.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from in_process import Answer, answer_all, draw_prompt, load_engine
from quiet import quietly
from script_options import COUNT, OutputFile

from octavo.engine import Engine

SYSTEM_TOKENS, NUM_REQUESTS = 512, 64
NUM_CHATS, NUM_TURNS, TURN_TOKENS = 4, 6, 32
NUM_DOCUMENTS, DOCUMENT_TOKENS = 12, 512
AMPLE_BLOCKS, SCARCE_BLOCKS, HOST_BYTES = 4096, 256, 256 << 20
_seeds = itertools.count()

Scenario = Callable[[Engine, np.random.Generator], list[Answer]]


@dataclass(frozen=True, slots=True)
class Round:
    """One side's play of one scenario."""

    scenario: str
    side: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: list[float]
    foreign_share: float
    is_valid: bool


def system_prompt(engine: Engine, random: np.random.Generator) -> list[Answer]:
    """Send 64 prompts that begin alike."""
    system = draw_prompt(random, SYSTEM_TOKENS)
    prompts = [system + draw_prompt(random, 24 + number % 17) for number in range(NUM_REQUESTS)]
    return answer_all(engine, prompts, 8)


def chat(engine: Engine, random: np.random.Generator) -> list[Answer]:
    """Hold conversations, turn by turn."""
    answers: list[Answer] = []
    histories: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    for _ in range(NUM_TURNS):
        prompts = [history + draw_prompt(random, TURN_TOKENS) for history in histories]
        turn = answer_all(engine, prompts, TURN_TOKENS)
        histories = [answer.prompt_token_ids + answer.token_ids for answer in turn]
        answers += turn
    return answers


def working_set(engine: Engine, random: np.random.Generator) -> list[Answer]:
    """Ask about each document twice; return the answers of the second time."""
    documents = [draw_prompt(random, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    for _ in range(2):
        prompts = [document + draw_prompt(random, 32) for document in documents]
        answers = [answer for prompt in prompts for answer in answer_all(engine, [prompt], 2)]
    return answers


@click.command()
@click.option("--rounds", default=3, show_default=True, type=COUNT, help="Rounds of each side.")
@click.option("--threads", type=COUNT, help="CPU threads; by default all.")
@click.option("--json", "json_path", type=OutputFile(), help="Write figures here.")
def main(rounds: int, threads: int | None, json_path: Path | None) -> None:
    """Compare tokens computed and time to first token."""
    base = {"max_num_seqs": NUM_REQUESTS, "cpu_threads": threads, "swap_space_bytes": 0}
    ample = {**base, "num_kv_blocks": AMPLE_BLOCKS}
    scarce = {**base, "num_kv_blocks": SCARCE_BLOCKS}
    off = load_engine(**ample, enable_prefix_caching=False)
    on = load_engine(**ample)
    device = load_engine(**scarce)
    host = load_engine(**{**scarce, "swap_space_bytes": HOST_BYTES})
    cases: list[tuple[str, Scenario, dict[str, Engine]]] = [
        ("system prompt", system_prompt, {"caching off": off, "caching on": on}),
        ("chat", chat, {"caching off": off, "caching on": on}),
        ("working set", working_set, {"device only": device, "device and host": host}),
    ]
    click.echo(
        f"{'':33}{'prompt':>8}{'cached':>8}{'share':>8}   first token: median      p99  rounds"
    )
    played: list[Round] = []
    for name, scenario, sides in cases:
        for _ in range(rounds):
            played += [play(name, scenario, side, engine) for side, engine in sides.items()]
        for side in sides:
            print_side([each for each in played if (each.scenario, each.side) == (name, side)])
    if json_path:
        json_path.write_text(json.dumps([asdict(each) for each in played], indent=2) + "\n")


def play(name: str, scenario: Scenario, side: str, engine: Engine) -> Round:
    """Play a scenario with prompts that nobody has seen, again while the machine is busy."""
    answers, watch = quietly(lambda: scenario(engine, np.random.default_rng(next(_seeds))))
    return Round(
        name,
        side,
        prompt_tokens=sum(len(answer.prompt_token_ids) for answer in answers),
        cached_tokens=sum(answer.num_cached_tokens for answer in answers),
        first_token_s=[answer.first_token_s for answer in answers],
        foreign_share=watch.foreign_share,
        is_valid=watch.is_valid,
    )


def print_side(rounds: list[Round]) -> None:
    """Print one side's counts, and the times of its quiet rounds."""
    prompt, cached = rounds[0].prompt_tokens, rounds[0].cached_tokens
    valid = [each for each in rounds if each.is_valid]
    times_s = [time_s for each in valid for time_s in each.first_token_s]
    times = "   others used the CPU: no claim  "
    if times_s:
        median_s, late_s = np.percentile(times_s, [50, 99])
        times = f"{median_s * 1e3:21.0f} ms {late_s * 1e3:6.0f} ms "
    click.echo(
        f"{rounds[0].scenario:16}{rounds[0].side:17}{prompt:8,}{cached:8,}{cached / prompt:8.1%}"
        f"{times} {len(valid)}/{len(rounds)}"
    )


if __name__ == "__main__":
    main()
