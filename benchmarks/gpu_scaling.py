"""Write the plan of what several GPUs should reach: tables of arithmetic, not of measurements.

    python -m benchmarks.gpu_scaling --docs docs

What the figures are made of stands in gpu/rank_plan.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import click
from benchmarks.doc_tables import markdown_table, write_table
from benchmarks.gpu.rank_plan import (
    H100,
    H200,
    LLAMA_8B,
    LLAMA_70B,
    Gpu,
    Grid,
    Model,
    decode_plan,
    sliced_exchange_s,
    stage_step,
)
from benchmarks.script_options import OutputFolder

PAGE = "gpu-scaling.md"
MODELS = (LLAMA_8B, LLAMA_70B)
GRIDS = (Grid(), Grid(2), Grid(4), Grid(8), Grid(1, 2))
BATCHES = (1, 32, 256)
CONTEXT = 1024
CHUNK = 8192

_DECODE_HEADS = (
    *("model", "ranks", "batch", "weights, GB", "KV, GB", "sums send, MB", "memory, ms"),
    *("exchange, ms", "launches, ms", "tokens/s", "with graphs", "of one GPU"),
)
_PREFILL_HEADS = (
    *("model", "ranks", "products, ms", "sums send, GB", "exchange, ms", "adding, ms"),
    *("tokens/s", "exchange by slices, ms"),
)


@click.command()
@click.option("--docs", type=OutputFolder(PAGE), help="Write the tables here.")
def main(docs: Path | None) -> None:
    """Print the plan's tables, and write them into the documentation if asked to."""
    for name, table in tables().items():
        click.echo(f"{name}\n\n{table}")
        if docs is not None:
            write_table(docs / PAGE, name, table)


def tables() -> dict[str, str]:
    """Return the page's tables by name."""
    made = {f"decode-{gpu.name}": decode_table(gpu) for gpu in (H200, H100)}
    return {**made, "prefill-H200": prefill_table(H200)}


def decode_table(gpu: Gpu) -> str:
    """Return what decoding should reach on GPUs of one kind."""
    rows = [
        _decode_row(gpu, model, grid, batch)
        for model, grid, batch in itertools.product(MODELS, GRIDS, BATCHES)
    ]
    return markdown_table(_DECODE_HEADS, rows)


def prefill_table(gpu: Gpu) -> str:
    """Return what one chunk of a prompt should take on GPUs of one kind."""
    grids = (Grid(), Grid(2), Grid(4), Grid(8))
    return markdown_table(
        _PREFILL_HEADS,
        [_prefill_row(gpu, model, grid) for model, grid in itertools.product(MODELS, grids)],
    )


def _decode_row(gpu: Gpu, model: Model, grid: Grid, batch: int) -> list[str]:
    plan = decode_plan(gpu, model, grid, batch, CONTEXT)
    alone = decode_plan(gpu, model, Grid(), batch, CONTEXT)
    step, what = plan.step, [model.name, str(grid), str(batch)]
    sizes = [f"{step.weight_bytes / 1e9:.1f}", f"{step.kv_bytes / 1e9:.2f}"]
    if not plan.fits:
        return [*what, *sizes, *["—"] * 4, "no room", "—", "—"]
    ratio = plan.recorded_tokens_per_s / alone.recorded_tokens_per_s
    return [
        *what,
        *sizes,
        f"{step.sent_bytes / 1e6:.2f}",
        f"{step.memory_s * 1e3:.2f}",
        f"{(step.exchange_s + step.adding_s) * 1e3:.2f}",
        f"{step.launch_s * 1e3:.2f}",
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.recorded_tokens_per_s:,.0f}",
        f"{ratio:.2f}" if alone.fits else "—",
    ]


def _prefill_row(gpu: Gpu, model: Model, grid: Grid) -> list[str]:
    step = stage_step(gpu, model, grid, CHUNK, 0, 1)
    sliced_s = sliced_exchange_s(gpu, model, grid.tp, CHUNK) if grid.tp > 1 else 0.0
    return [
        model.name,
        str(grid),
        f"{step.memory_s * 1e3:.0f}",
        f"{step.sent_bytes / 1e9:.1f}",
        f"{step.exchange_s * 1e3:.0f}",
        f"{step.adding_s * 1e3:.0f}",
        f"{CHUNK / step.floor_s:,.0f}",
        f"{sliced_s * 1e3:.0f}",
    ]


if __name__ == "__main__":
    main()
