"""Time a preempted sequence's return, by swap and by recomputation, beside what the model predicts.

    python benchmarks/swap.py

Runs the demo model twice in this process, once always swapping and once always recomputing. A
sequence of about each length is preempted, alone, and comes back; its next token's time, less that
of the decode steps before it, is what the preemption cost. Both sides take turns, and the medians
stand beside what `PreemptionCosts` says for the same blocks and tokens, with the rates that the
engine measured when it started. No prefix caching: what is recomputed is not found again.

A context during which other processes took more than 5 % of the CPU is measured again, up to 3
times, and marked if it never was quiet.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from in_process import draw_prompt, load_runner, make_request
from quiet import quietly
from script_options import COUNT, OutputFile

from octavo.engine import Engine
from octavo.scheduler.preemption import PreemptionCosts

CONTEXTS = (64, 256, 512, 1024, 2048, 4096)
MODES = ("swap", "recompute")
BLOCK_SIZE = 16
HOST_BYTES = 256 << 20
NUM_DECODE_STEPS = 5
"""Before each preemption; the context grows by as many tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One context; times are medians in seconds."""

    num_tokens: int
    swap_s: float
    predicted_swap_s: float
    recompute_s: float
    predicted_recompute_s: float
    foreign_share: float
    is_valid: bool


@click.command()
@click.option(
    "--runs", default=5, show_default=True, type=COUNT, help="Preemptions of each kind a context."
)
@click.option("--threads", type=COUNT, help="CPU threads; by default all.")
@click.option(
    "--longest",
    default=max(CONTEXTS),
    show_default=True,
    type=click.IntRange(min(CONTEXTS), max(CONTEXTS)),
    help="Longest context.",
)
@click.option("--json", "json_path", type=OutputFile(), help="Write figures here.")
def main(runs: int, threads: int | None, longest: int, json_path: Path | None) -> None:
    """Compare swap with recomputation."""
    contexts = [context for context in CONTEXTS if context <= longest]
    loaded = {
        mode: load_runner(
            preemption_mode=mode,
            enable_prefix_caching=False,
            num_kv_blocks=longest // BLOCK_SIZE + 16,
            block_size=BLOCK_SIZE,
            swap_space_bytes=HOST_BYTES,
            cpu_threads=threads,
        )
        for mode in MODES
    }
    engines = {mode: Engine(config, runner) for mode, (config, runner) in loaded.items()}
    costs = loaded["swap"][1].costs
    print_costs(costs)
    comparisons = [compare(engines, costs, context, runs) for context in contexts]
    print_comparisons(comparisons, costs)
    if json_path:
        figures = {
            "costs": asdict(costs),
            "switch_tokens": switch_tokens(costs, longest),
            "contexts": [asdict(each) for each in comparisons],
        }
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


def compare(
    engines: dict[str, Engine], costs: PreemptionCosts, context: int, runs: int
) -> Comparison:
    """Preempt a sequence of `context` tokens in turns by swap and by recomputation."""
    times_s, watch = quietly(lambda: time_preemptions(engines, context, runs))
    return Comparison(
        context,
        statistics.median(times_s["swap"]),
        costs.swap_s(-(-context // BLOCK_SIZE)),
        statistics.median(times_s["recompute"]),
        costs.recompute_s(context),
        watch.foreign_share,
        watch.is_valid,
    )


def time_preemptions(engines: dict[str, Engine], context: int, runs: int) -> dict[str, list[float]]:
    """Return what each preemption cost, in seconds, by mode."""
    num_grown = runs * (NUM_DECODE_STEPS + 1)
    num_prompt = max(1, context - num_grown // 2)
    prompt = draw_prompt(np.random.default_rng(context), num_prompt)
    for engine in engines.values():
        engine.add(make_request(prompt, num_grown + 2))
        time_token(engine)
    times_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _, mode in itertools.product(range(runs), MODES):
        engine = engines[mode]
        usual_s = statistics.median(time_token(engine) for _ in range(NUM_DECODE_STEPS))
        engine.scheduler.preempt(engine.scheduler.running[0], time.monotonic())
        times_s[mode].append(time_token(engine) - usual_s)
    for engine in engines.values():
        while engine.has_unfinished:
            engine.step()
    num_swaps = engines["swap"].scheduler.num_swap_preemptions
    assert num_swaps == engines["swap"].scheduler.num_preemptions, "the host had no room"
    return times_s


def time_token(engine: Engine) -> float:
    """Step until a token comes; return the seconds."""
    started_s = time.perf_counter()
    while not engine.step().outputs:
        pass
    return time.perf_counter() - started_s


def switch_tokens(costs: PreemptionCosts, longest: int) -> int | None:
    """Return from how many tokens on the model prefers to swap; None if never up to `longest`."""
    for num_tokens in range(1, longest + 1):
        if costs.prefers_swap(-(-num_tokens // BLOCK_SIZE), num_tokens):
            return num_tokens
    return None


def cheaper(swap_s: float, recompute_s: float) -> str:
    """Return the mode that takes less time."""
    return "swap" if swap_s < recompute_s else "recompute"


def print_costs(costs: PreemptionCosts) -> None:
    """Print what the engine measured when it started."""
    click.echo(
        f"{costs.bytes_per_block / 1024:.0f} KiB a block, copies at "
        f"{costs.copy_bytes_per_s / 1e9:.2f} GB/s after {costs.copy_latency_s * 1e6:.0f} us, "
        f"prefill at {costs.prefill_tokens_per_s:,.0f} tokens/s\n"
    )


def print_comparisons(comparisons: list[Comparison], costs: PreemptionCosts) -> None:
    """Print one line a context, then where each side wins."""
    click.echo(
        f"{'tokens':>8}{'swap':>11}{'predicted':>11}{'recompute':>13}{'predicted':>11}"
        f"{'cheaper':>12}{'predicted':>12}"
    )
    for each in comparisons:
        measured = cheaper(each.swap_s, each.recompute_s)
        predicted = cheaper(each.predicted_swap_s, each.predicted_recompute_s)
        noise = "" if each.is_valid else f"  NO CLAIM: others {each.foreign_share:.0%} of CPU"
        click.echo(
            f"{each.num_tokens:8,}{each.swap_s * 1e3:8.1f} ms{each.predicted_swap_s * 1e3:8.1f} ms"
            f"{each.recompute_s * 1e3:10.1f} ms{each.predicted_recompute_s * 1e3:8.1f} ms"
            f"{measured:>12}{predicted:>12}{noise}"
        )
    switch = switch_tokens(costs, comparisons[-1].num_tokens)
    click.echo(
        "\nthe model never swaps up to here"
        if switch is None
        else f"\nthe model swaps from {switch:,} tokens on"
    )


if __name__ == "__main__":
    main()
