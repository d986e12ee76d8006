"""The part `ranks`, last third: tokens/s on one, two, four and eight devices, and in two stages.

A checkpoint of random weights is written to disk, for each rank reads its own part of it.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from gpu.context import Context
from gpu.decode_speed import answer_length, time_steps
from gpu.engines import draw_asks, options_of, release
from gpu.models import LLAMA_1B, LLAMA_8B, TINY, ModelSize, save_checkpoint, weight_bytes
from gpu.rank_answers import missing_devices, name_of, rank_options
from gpu.rank_plan import LLAMA_8B as PLANNED_8B
from gpu.rank_plan import Grid, decode_plan, planned_gpu
from gpu.report import Line, Section, Verdict, unmeasured_line
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.executor.parallel.rank_zero import RankZero

_GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2))
_HEADS = ("ranks", "batch", "tokens/s", "of one device", "the plan's tokens/s")
_CONTEXT = 1024


def rank_speed(context: Context) -> list[Section]:
    """Time decode steps on each grid for which there are devices."""
    if reason := missing_devices((2, 1), context):
        return [Section("Ranks: tokens/s", _HEADS, (Line(("all", "all", reason, "", "")),))]
    length = _CONTEXT if context.is_gpu else 24
    lines: list[Line] = []
    alone: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = _choose_size(Path(folder), context)
        save_checkpoint(size, Path(folder), context.device)
        release(context.device)
        for grid in _GRIDS:
            lines += _grid_lines(folder, size, length, grid, context, alone)
            release(context.device)
    notes = (
        f"A random Llama of {size.num_hidden_layers} layers of {size.hidden_size} in bfloat16, "
        f"prompts of {length:,} tokens, greedy.",
    )
    return [Section("Ranks: tokens/s", _HEADS, tuple(lines), notes, is_speed=True)]


def _choose_size(folder: Path, context: Context) -> ModelSize:
    """Return the model that the plan speaks of, or a smaller one where the disk has no room."""
    if not context.is_gpu:
        return TINY
    embedding_bytes = 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    needed = 1.2 * (weight_bytes(LLAMA_8B, 2) + embedding_bytes)
    return LLAMA_8B if shutil.disk_usage(folder).free > needed else LLAMA_1B


def _grid_lines(
    checkpoint: str,
    size: ModelSize,
    length: int,
    grid: tuple[int, int],
    context: Context,
    alone: dict[int, float],
) -> list[Line]:
    """Return the lines of one grid; fills `alone`, tokens/s by batch, in with one device's."""
    name = name_of(grid)
    if reason := missing_devices(grid, context):
        return [Line((name, "all", reason, "", ""))]
    batches, budget = ((1, 32, 256), 8192) if context.is_gpu else ((1, 4), 64)
    num_new = answer_length(max(batches) * length, budget)
    if context.is_late:
        return [unmeasured_line((name, "all"), _HEADS)]
    options = {
        **options_of(context.device),
        "model": checkpoint,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": budget,
        "max_model_len": length + num_new,
        "num_kv_blocks": max(batches) * -(-(length + num_new) // 16) + 1,
        **rank_options(grid, context),
    }
    config = EngineConfig(**options)  # type: ignore[arg-type]
    lines = []
    with ExitStack() as closing:
        runner = ModelRunner(config) if grid == (1, 1) else RankZero(config)
        if isinstance(runner, RankZero):
            closing.callback(runner.close)
        engine = Engine(config, runner)
        for batch in batches:
            asks = draw_asks([length] * batch, num_new, size.vocab_size, greedy=True)
            # A step holds the share of a stage, or the one request that there is.
            in_step = max(1, batch // grid[1])
            steps_a_token = grid[1] if batch < grid[1] else 1
            seconds = time_steps(engine, asks, context.device).seconds
            speed = in_step / (seconds * steps_a_token)
            lines.append(_line(grid, batch, speed, alone, size))
    return lines


def _line(
    grid: tuple[int, int], batch: int, speed: float, alone: dict[int, float], size: ModelSize
) -> Line:
    if grid == (1, 1):
        alone[batch] = speed
    ratio = f"{speed / alone[batch]:.2f}" if batch in alone else "not measured"
    is_gpu = torch.cuda.is_available() and size is LLAMA_8B
    gpu = planned_gpu(torch.cuda.get_device_name()) if is_gpu else None
    figures = (name_of(grid), str(batch), f"{speed:,.0f}", ratio)
    if gpu is None:
        return Line((*figures, "no plan"))
    wanted = decode_plan(gpu, PLANNED_8B, Grid(*grid), batch, _CONTEXT).tokens_per_s
    return Line((*figures, f"{wanted:,.0f}"), Verdict.of(speed >= wanted))
