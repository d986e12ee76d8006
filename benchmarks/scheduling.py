"""Time what the engine does around the model for a full batch of decoding sequences.

    python -m benchmarks.scheduling

Sequences of many lengths decode with the real scheduler, KV cache manager and batch builder; only
the model is left out, and each draws the same token. Block tables grow and full blocks are
published on the way. Medians over all steps, and the slowest in a hundred, in microseconds.
"""

from __future__ import annotations

import gc
import statistics
import time

import click
from benchmarks.dry_run import make_scheduler
from benchmarks.quiet import quietly
from benchmarks.script_options import COUNT, Amount

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.executor.batch import BatchBuilder
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SampledToken
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import Sequence

BLOCK_SIZE = 16
SHORTEST, LONGEST = 200, 2000
MAX_MODEL_LEN = 8192

Timings = dict[str, list[float]]
"""Seconds of each step, by what was done."""


@click.command()
@click.option("--sequences", default=256, show_default=True, type=COUNT)
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(min=2))
@click.option("--limit-us", type=Amount(), help="Fail if schedule and build together take longer.")
def main(sequences: int, steps: int, limit_us: float | None) -> None:
    """Time schedule, build and update."""
    timings, watch = quietly(lambda: time_steps(sequences, steps))
    timings["schedule + build"] = [
        sum(pair) for pair in zip(timings["schedule"], timings["build"], strict=True)
    ]
    noise = "" if watch.is_valid else f"  NO CLAIM: others {watch.foreign_share:.0%} of CPU"
    click.echo(
        f"{sequences} decoding sequences of {SHORTEST} to {LONGEST} tokens, {steps} steps{noise}"
    )
    for name, seconds in timings.items():
        slow_us = statistics.quantiles(seconds, n=100)[-1] * 1e6
        click.echo(f"{name:18}{statistics.median(seconds) * 1e6:8.0f} us{slow_us:8.0f} us (p99)")
    median_us = statistics.median(timings["schedule + build"]) * 1e6
    if limit_us is not None and median_us > limit_us:
        raise click.ClickException(f"{median_us:.0f} us but at most {limit_us:.0f} are allowed")


def time_steps(num_sequences: int, num_steps: int) -> Timings:
    """Run decode steps; return the seconds of each part of each step."""
    scheduler = start_decoding(num_sequences, num_steps)
    limits = scheduler.limits
    builder = BatchBuilder(
        limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, BLOCK_SIZE
    )
    timings: Timings = {"schedule": [], "build": [], "update": []}
    drawn = (SampledToken(1),) * num_sequences
    gc.collect()
    for _ in range(num_steps):
        started_s = time.perf_counter()
        output = scheduler.schedule(0.0)
        scheduled_s = time.perf_counter()
        builder.build(output)
        built_s = time.perf_counter()
        scheduler.advance(output)
        scheduler.expect(output.sampling)
        scheduler.update(output, drawn, 0.0)
        updated_s = time.perf_counter()
        assert len(output.sampling) == output.num_scheduled_tokens == num_sequences
        timings["schedule"].append(scheduled_s - started_s)
        timings["build"].append(built_s - scheduled_s)
        timings["update"].append(updated_s - built_s)
    return timings


def start_decoding(num_sequences: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose sequences have had their prompts computed."""
    lengths = [
        SHORTEST + index * (LONGEST - SHORTEST) // max(1, num_sequences - 1)
        for index in range(num_sequences)
    ]
    num_blocks = sum((length + num_steps) // BLOCK_SIZE + 2 for length in lengths)
    cache = KVCacheManager(num_blocks + num_blocks // 50, BLOCK_SIZE)
    limits = SchedulerLimits(num_sequences, num_sequences * LONGEST, MAX_MODEL_LEN)
    scheduler = make_scheduler(cache, limits)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True, seed=0)
    for index, length in enumerate(lengths):
        prompt = tuple(range(index * LONGEST, index * LONGEST + length))
        scheduler.add(Sequence(Request(str(index), prompt, params)))
    output = scheduler.schedule(0.0)
    assert len(output.sampling) == num_sequences, "all prompts fit one step"
    scheduler.advance(output)
    scheduler.expect(output.sampling)
    scheduler.update(output, (SampledToken(1),) * num_sequences, 0.0)
    return scheduler


if __name__ == "__main__":
    main()
