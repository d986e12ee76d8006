"""Count how KV memory is used: paged against contiguous reservation, and a pool that is too small.

    python -m benchmarks.memory

Runs the real scheduler and KV cache manager without a model, so every figure is counted and exact,
and does not depend on the machine or on who else uses it.

The first table plays the mixed workload, all of it queued at once, in the same memory four ways:
in blocks of 16 slots, and with the longest sequence's slots reserved for each in one piece, where
the longest is that of the workload itself, 2,048 tokens, or the demo model's context. At first the
token budget of a step, not memory, keeps requests waiting; memory is full from the first step on
that leaves some waiting though it could compute more.

Static batches of the same requests reserve, for every row, the longest prompt and the longest
output of the batch, until the batch ends. A slot counts as filled once its token is there, also
when the answer has ended and nobody reads it any more.

The second table plays 8 requests of 256 prompt and 256 output tokens in blocks for one and a half.
With prefix caching, the blocks that are swapped out include those evicted to the host.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from benchmarks.dry_run import make_scheduler, play
from benchmarks.script_options import COUNT, OutputFile
from benchmarks.workload import Job, mixed_workload

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import NO_BLOCK

BLOCK_SIZE = 16
RESERVED_TOKENS = (768, 2048, 8192)
"""The workload's longest prompt plus output, a usual limit, and the demo model's context."""
STATIC_BATCH = 8
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 512
DEMO_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Layers, keys and values, heads, their size, bytes of a bfloat16."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One step's memory."""

    num_sequences: int
    num_held_slots: int
    num_filled_slots: int
    num_waiting: int
    has_spent_budget: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Averages over the steps of one run."""

    kind: str
    num_slots: int
    num_steps: int
    unfilled_share: float
    """Of the slots that are held, over all steps."""
    held_share: float
    """Of all slots, while requests wait."""
    full_held_share: float
    """The same from when memory was first full; so are the two below."""
    full_filled_share: float
    num_sequences: float
    most_sequences: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What static batches do with the slots that they reserve."""

    batch_size: int
    reserved_slots: float
    """A batch, on average over the steps."""
    filled_share: float
    """Of the slots that are reserved, over all steps."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a pool for one and a half requests costs."""

    prefix_caching: bool
    mode: str
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_swapped_out_blocks: int


@click.command()
@click.option("--requests", default=1024, show_default=True, type=COUNT)
@click.option(
    "--blocks",
    default=1024,
    show_default=True,
    type=click.IntRange(min=max(RESERVED_TOKENS) // BLOCK_SIZE),
    help="Device blocks of 16 slots.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--json", "json_path", type=OutputFile(), help="Write figures here.")
def main(requests: int, blocks: int, seed: int, json_path: Path | None) -> None:
    """Count slots, sequences and preemptions."""
    jobs = mixed_workload(seed, requests)
    usages = [paged(jobs, blocks)]
    usages += [contiguous(jobs, blocks * BLOCK_SIZE, length) for length in RESERVED_TOKENS]
    mebibytes = blocks * BLOCK_SIZE * DEMO_BYTES_PER_TOKEN / 2**20
    click.echo(
        f"{requests:,} mixed requests in {blocks * BLOCK_SIZE:,} slots ({mebibytes:.0f} MiB of the "
        "demo model)\n"
    )
    print_usages(usages)
    reservation = static_batches(jobs)
    click.echo(
        f"\nstatic batches of {reservation.batch_size}: {reservation.reserved_slots:,.0f} slots a "
        f"batch, {reservation.filled_share:.1%} of these with a token in them"
    )
    pressures = [
        pressure(caching, mode) for caching in (False, True) for mode in ("recompute", "swap")
    ]
    click.echo("\n8 requests of 256 + 256 tokens in 48 blocks, each needs 32\n")
    print_pressures(pressures)
    if json_path:
        figures = {
            "requests": requests,
            "blocks": blocks,
            "seed": seed,
            "usage": [asdict(usage) for usage in usages],
            "static": asdict(reservation),
            "pressure": [asdict(each) for each in pressures],
        }
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


def paged(jobs: list[Job], num_blocks: int) -> Usage:
    """Run with blocks of 16 slots."""
    cache = KVCacheManager(num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, max(RESERVED_TOKENS))
    return measure("blocks of 16", make_scheduler(cache, limits), jobs, num_blocks * BLOCK_SIZE)


def contiguous(jobs: list[Job], num_slots: int, length: int) -> Usage:
    """Run with one block of `length` slots for each sequence, taken whole on admission.

    Seats are the limit; the spare blocks beyond them keep the scheduler's reserve out of the count.
    """
    num_sequences = num_slots // length
    cache = KVCacheManager(2 * num_sequences + 2, length, prefix_caching=False)
    limits = SchedulerLimits(num_sequences, MAX_NUM_BATCHED_TOKENS, length)
    return measure(f"{length:,} reserved", make_scheduler(cache, limits), jobs, num_slots)


def static_batches(jobs: list[Job], batch_size: int = STATIC_BATCH) -> Reservation:
    """Count what batches in the order of arrival reserve and fill, each until its longest ends."""
    num_steps = num_reserved = num_filled = 0
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        longest = max(job.num_output_tokens for job in batch)
        width = max(len(job.prompt_token_ids) for job in batch) + longest
        num_steps += longest
        num_reserved += longest * len(batch) * width
        for job in batch:
            count = job.num_output_tokens
            num_filled += longest * len(job.prompt_token_ids)
            num_filled += count * (count + 1) // 2 + (longest - count) * count
    return Reservation(batch_size, num_reserved / num_steps, num_filled / num_reserved)


def measure(kind: str, scheduler: Scheduler, jobs: list[Job], num_slots: int) -> Usage:
    """Play the jobs and average what each step holds."""
    steps = [occupancy(scheduler, output) for output in play(scheduler, jobs)]
    first = next(i for i, step in enumerate(steps) if not step.has_spent_budget)
    waited = [step for step in steps if step.num_waiting]
    full = [step for step in steps[first:] if step.num_waiting]
    if not full:
        raise click.ClickException(
            f"memory was never full with {len(jobs)} requests; raise --requests or lower --blocks"
        )
    num_held = sum(step.num_held_slots for step in steps)
    return Usage(
        kind,
        num_slots,
        len(steps),
        unfilled_share=1 - sum(step.num_filled_slots for step in steps) / num_held,
        held_share=statistics.fmean(step.num_held_slots for step in waited) / num_slots,
        full_held_share=statistics.fmean(step.num_held_slots for step in full) / num_slots,
        full_filled_share=statistics.fmean(step.num_filled_slots for step in full) / num_slots,
        num_sequences=statistics.fmean(step.num_sequences for step in full),
        most_sequences=max(step.num_sequences for step in steps),
        num_preemptions=scheduler.num_preemptions,
    )


def occupancy(scheduler: Scheduler, output: SchedulerOutput) -> Occupancy:
    """Count unique blocks, and in each the most slots that any of its sequences has filled."""
    size = scheduler.cache.block_size
    being_computed = {id(sequence): count for sequence, count, _ in output.scheduled}
    filled: dict[int, int] = {}
    for sequence in scheduler.seating:
        num_tokens = sequence.num_computed_tokens + being_computed.get(id(sequence), 0)
        for place, block in enumerate(sequence.block_table):
            if block != NO_BLOCK:
                num_filled = min(size, num_tokens - place * size)
                filled[block] = max(filled.get(block, 0), num_filled)
    num_held = scheduler.cache.num_blocks - scheduler.cache.num_free_blocks
    assert len(filled) == num_held, f"{num_held} blocks are held but tables name {len(filled)}"
    return Occupancy(
        num_sequences=len(scheduler.running) + len(scheduler.restoring),
        num_held_slots=len(filled) * size,
        num_filled_slots=sum(filled.values()),
        num_waiting=len(scheduler.waiting),
        has_spent_budget=output.num_scheduled_tokens == MAX_NUM_BATCHED_TOKENS,
    )


def pressure(prefix_caching: bool, mode: str) -> Pressure:
    """Run requests that need 32 blocks each where there are 48."""
    prompts = [list(range(first, first + 256)) for first in range(0, 256 * 8, 256)]
    jobs = [Job(prompt, 256) for prompt in prompts]
    num_host_blocks = 64 if mode == "swap" else 0
    cache = KVCacheManager(
        48, BLOCK_SIZE, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching
    )
    limits = SchedulerLimits(len(jobs), MAX_NUM_BATCHED_TOKENS, 1024)
    scheduler = make_scheduler(cache, limits, swaps=mode == "swap")
    outputs = list(play(scheduler, jobs))
    num_computed = sum(output.num_scheduled_tokens for output in outputs)
    # The last token drawn is never computed.
    num_needed = sum(len(job.prompt_token_ids) + job.num_output_tokens - 1 for job in jobs)
    return Pressure(
        prefix_caching,
        mode,
        len(outputs),
        scheduler.num_preemptions,
        num_recomputed_tokens=num_computed - num_needed,
        num_swapped_out_blocks=sum(len(output.copies.swap_out) for output in outputs),
    )


def print_usages(usages: list[Usage]) -> None:
    """Print one column for each way to give out memory."""
    rows = {
        "allocated slots that are unused": [f"{each.unfilled_share:.1%}" for each in usages],
        "slots allocated while requests wait": [f"{each.held_share:.1%}" for each in usages],
        "  from when memory was first full": [f"{each.full_held_share:.1%}" for each in usages],
        "  of these with a token in them": [f"{each.full_filled_share:.1%}" for each in usages],
        "sequences at once, on average": [f"{each.num_sequences:.1f}" for each in usages],
        "  at most": [str(each.most_sequences) for each in usages],
        "  times as many with blocks": [
            f"{usages[0].num_sequences / each.num_sequences:.1f}" for each in usages
        ],
        "steps": [f"{each.num_steps:,}" for each in usages],
        "preemptions": [f"{each.num_preemptions:,}" for each in usages],
    }
    click.echo(f"{'':40}" + "".join(f"{each.kind:>16}" for each in usages))
    for name, cells in rows.items():
        click.echo(f"{name:40}" + "".join(f"{cell:>16}" for cell in cells))


def print_pressures(pressures: list[Pressure]) -> None:
    """Print one line for each way to make room."""
    click.echo(
        f"{'prefix caching':16}{'mode':12}{'preemptions':>12}{'tokens recomputed':>20}"
        f"{'blocks swapped out':>20}{'steps':>8}"
    )
    for each in pressures:
        click.echo(
            f"{'on' if each.prefix_caching else 'off':16}{each.mode:12}"
            f"{each.num_preemptions:12,}{each.num_recomputed_tokens:20,}"
            f"{each.num_swapped_out_blocks:20,}{each.num_steps:8,}"
        )


if __name__ == "__main__":
    main()
