"""The part `ranks`, second third: how long sums over a tensor group take, and at which rate.

Sums of a decode step are as many rows as sequences, those of a prefill step as many as tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gpu.context import Context
from gpu.rank_answers import missing_devices, name_of
from gpu.rank_plan import LATENCY_S, LLAMA_8B, added_bytes, planned_gpu, sum_bytes
from gpu.report import Line, Section
from gpu.sum_process import HOST

_HEADS = ("ranks", "rows", "each sends, MB", "sum, µs", "GB/s sent", "the plan's, µs")
_LIMIT_S = 120.0


def rank_sums(context: Context) -> list[Section]:
    """Time sums among 2, 4 and 8 ranks, where there are so many devices."""
    hidden, rows = (LLAMA_8B.hidden, (1, 32, 256, 8192)) if context.is_gpu else (64, (1, 32))
    lines: list[Line] = []
    for tp in (2, 4, 8):
        grid = (tp, 1)
        if reason := missing_devices(grid, context):
            lines.append(Line((name_of(grid), "all", "", reason, "", "")))
            continue
        if context.is_late:
            lines.append(Line((name_of(grid), "all", "", "out of time", "", "")))
            continue
        times_s = _time_sums(tp, hidden, rows, context)
        lines += [_line(tp, hidden, count, times_s[count], context) for count in rows]
    notes = (f"States of {hidden:,} numbers in bfloat16, one sum behind the other.",)
    return [Section("Ranks: sums over a tensor group", _HEADS, tuple(lines), notes, is_speed=True)]


def _time_sums(tp: int, hidden: int, rows: tuple[int, ...], context: Context) -> dict[int, float]:
    """Return the seconds that the slowest rank takes for a sum, by its rows.

    Raises:
        RuntimeError: A rank failed; its words are in the message.
    """
    store = TCPStore(
        HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_LIMIT_S)
    )
    command = [sys.executable, "-m", "gpu.sum_process", "--size", str(tp)]
    command += ["--port", str(store.port), "--device", context.device.type]
    command += ["--hidden", str(hidden), "--rows", *map(str, rows)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        printed = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank that times sums failed: {errors.strip()[-500:]}")
    found = [json.loads(output.splitlines()[-1]) for output, _ in printed]
    return {count: max(times_s[str(count)] for times_s in found) for count in rows}


def _line(tp: int, hidden: int, rows: int, seconds: float, context: Context) -> Line:
    sent = sum_bytes(rows, hidden, tp)
    gpu = planned_gpu(torch.cuda.get_device_name() if context.is_gpu else "")
    plan = "no plan"
    if gpu is not None:
        planned_s = LATENCY_S[tp] + sent / gpu.link_bytes_per_s
        planned_s += added_bytes(rows, hidden, tp) / gpu.bytes_per_s
        plan = f"{planned_s * 1e6:,.0f}"
    figures = (f"{sent / 1e6:.2f}", f"{seconds * 1e6:,.0f}", f"{sent / seconds / 1e9:.1f}")
    return Line((name_of((tp, 1)), str(rows), *figures, plan))
