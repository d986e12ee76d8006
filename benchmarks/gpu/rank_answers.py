"""The part `ranks`, first third: one model on several devices answers as on one, and fails well.

Each grid of ranks is loaded once and answers the same greedy requests in float32; then one of its
ranks is killed. On a CPU ranks are processes that speak over gloo.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gpu.context import Context
from gpu.engines import Ask, Trace, add_all, answer, draw_asks, make_engine, options_of, release
from gpu.models import SMALL, TINY, ModelSize, save_checkpoint
from gpu.rank_plan import num_sums, sum_bytes
from gpu.report import Line, Section, Verdict
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import EngineError
from octavo.executor.parallel.rank_zero import RankZero

GRIDS = ((2, 1), (1, 2), (2, 2))
"""Of tp and pp."""
_HEADS = ("ranks", "what", "found")
_FLOAT32_BYTES = 4
_STEPS_BEFORE_KILL = 3
_END_S = 5.0


def rank_answers(context: Context) -> list[Section]:
    """Answer on each grid for which there are devices, and kill one of its ranks."""
    title = "Ranks: answers, bytes and a lost rank"
    if reason := missing_devices((2, 1), context):
        return [Section(title, _HEADS, (Line(("all", "everything", reason)),))]
    size = SMALL if context.is_gpu else TINY
    lengths = (600, 300, 45, 1, 515, 128) if context.is_gpu else (40, 1, 17)
    asks = draw_asks(lengths, 32 if context.is_gpu else 6, size.vocab_size, greedy=True)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(size, Path(folder), context.device)
        release(context.device)
        config = EngineConfig(**_options(folder, asks, context, (1, 1)))
        expected = answer(make_engine(config), asks)
        release(context.device)
        for grid in GRIDS:
            lines += _grid_lines(folder, asks, expected, size, context, grid)
    notes = ("Compared with one device. In float32 sums over ranks change about no greedy token.",)
    return [Section(title, _HEADS, tuple(lines), notes)]


def name_of(grid: tuple[int, int]) -> str:
    """Return what a table calls a grid of (tp, pp)."""
    tp, pp = grid
    return " x ".join([f"tp {tp}"] * (tp > 1 or pp == 1) + [f"pp {pp}"] * (pp > 1))


def missing_devices(grid: tuple[int, int], context: Context) -> str | None:
    """Return why a grid is skipped, if it is."""
    needed, there = grid[0] * grid[1], context.num_devices
    if needed <= there:
        return None
    kind = "GPUs" if context.is_gpu else "processes, with which a CPU stands for devices,"
    return f"skipped: needs {needed} {kind} of which there are {there}"


def rank_options(grid: tuple[int, int], context: Context) -> dict[str, object]:
    """Return the engine options that spread a model over the ranks of a grid."""
    tp, pp = grid
    return {
        "device": context.device.type,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "step_timeout_s": 60.0,
    }


def _options(
    checkpoint: str, asks: list[Ask], context: Context, grid: tuple[int, int]
) -> dict[str, object]:
    longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks)
    return {
        **options_of(context.device),
        "model": checkpoint,
        "dtype": "float32",
        "max_model_len": longest,
        "num_kv_blocks": len(asks) * -(-longest // 16) + 1,
        **rank_options(grid, context),
    }


def _grid_lines(
    checkpoint: str,
    asks: list[Ask],
    expected: list[Trace],
    size: ModelSize,
    context: Context,
    grid: tuple[int, int],
) -> list[Line]:
    name = name_of(grid)
    if reason := missing_devices(grid, context):
        return [Line((name, "everything", reason))]
    if context.is_late:
        return [Line((name, "everything", "out of time"), Verdict.MISSED)]
    config = EngineConfig(**_options(checkpoint, asks, context, grid))  # type: ignore[arg-type]
    with closing(RankZero(config)) as runner:
        engine = Engine(config, runner)
        before_bytes = runner.sent_bytes
        together = answer(engine, asks)
        sent_bytes = runner.sent_bytes - before_bytes
        alone = [answer(engine, [ask])[0] for ask in asks]
        lines = [
            _differing("tokens of one device", _tokens(together), _tokens(expected)),
            _differing("the same bits alone and in a batch", together, alone),
            _bytes_line(sent_bytes, _sum_bytes(asks, size, grid)),
            _kill_line(engine, runner, asks),
        ]
    return [Line((name, *line.cells), line.verdict) for line in lines]


def _tokens(traces: list[Trace]) -> list[list[int]]:
    return [[token_id for token_id, _ in trace] for trace in traces]


def _differing(what: str, found: Sequence[object], expected: Sequence[object]) -> Line:
    differing = sum(a != b for a, b in zip(found, expected, strict=True))
    return Line((what, f"{differing} of {len(found)} differ"), Verdict.of(not differing))


def _sum_bytes(asks: list[Ask], size: ModelSize, grid: tuple[int, int]) -> int:
    """Return what rank zero, of the last stage, sends while all are answered once."""
    tp, pp = grid
    # The last token of an answer is computed by no step.
    num_tokens = sum(len(ask.prompt) + (ask.params.max_tokens or 0) - 1 for ask in asks)
    sums = num_sums(size.num_hidden_layers // pp, is_first_stage=pp == 1)
    return sums * sum_bytes(num_tokens, size.hidden_size, tp, _FLOAT32_BYTES)


def _bytes_line(sent: int, formula: int) -> Line:
    found = f"{sent:,}, {formula:,} by the formula"
    return Line(("bytes that rank 0 sends", found), Verdict.of(sent == formula))


def _kill_line(engine: Engine, runner: RankZero, asks: list[Ask]) -> Line:
    """Kill rank 1 in the middle of answers; say how that is noticed, and whether all ranks end."""
    what, (pid, *_) = "rank 1 killed in a step", runner.worker_pids
    add_all(engine, asks)
    for _ in range(_STEPS_BEFORE_KILL):
        engine.step()
    os.kill(pid, signal.SIGKILL)
    started_s = time.monotonic()
    try:
        while engine.has_unfinished:
            engine.step()
    except EngineError as error:
        noticed_s = time.monotonic() - started_s
        pids = runner.worker_pids
        runner.close()
        is_named = str(error).startswith("rank 1 (") and "SIGKILL" in str(error)
        are_gone = not any(Path(f"/proc/{each}").exists() for each in pids)
        holds = is_named and are_gone and noticed_s < _END_S
        return Line((what, f"after {noticed_s:.1f} s: {error}"), Verdict.of(holds))
    return Line((what, "nobody noticed"), Verdict.MISSED)
