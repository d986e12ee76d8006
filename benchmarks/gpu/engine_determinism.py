"""The part `determinism`, second half: an engine's answers are the same bits however it works.

Knows the engine from outside.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.context import Context
from gpu.engines import (
    Ask,
    Trace,
    answer,
    draw_asks,
    eager,
    make_engine,
    options_of,
    release,
    synchronous,
)
from gpu.models import SMALL, TINY, save_checkpoint
from gpu.report import Line, Section, Verdict
from octavo.config import EngineConfig
from octavo.executor.device_tools import DeviceTools

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Axis:
    """One way to work differently."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    change_tools: Callable[[DeviceTools], DeviceTools] = lambda tools: tools
    alone: bool = False
    """One request after the other."""
    preempts: bool = False
    """It must have preempted, or it shows nothing."""
    is_promised: bool = True


def engine_determinism(context: Context) -> list[Section]:
    """Answer the same requests in different ways and compare tokens and log-probabilities."""
    size = SMALL if context.is_gpu else TINY
    lengths = (600, 300, 45, 1, 515, 128, 700, 31) if context.is_gpu else (40, 37, 44, 1)
    asks = draw_asks(lengths, 64 if context.is_gpu else 16, size.vocab_size)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(size, Path(folder), context.device)
        release(context.device)
        for dtype in ("bfloat16",) if context.quick else ("bfloat16", "float32"):
            lines += _lines(Path(folder), dtype, asks, context)
    heads = ("type", "axis", "answers", "answers that differ")
    notes = ("Compared with each request alone.",)
    return [Section("Engine: the same tokens and log-probabilities", heads, tuple(lines), notes)]


def _lines(checkpoint: Path, dtype: str, asks: list[Ask], context: Context) -> list[Line]:
    expected: list[Trace] | None = None
    lines = []
    for axis in _axes(asks, context):
        if context.is_late:
            lines.append(Line((dtype, axis.name, "0", "out of time"), Verdict.MISSED))
            continue
        traces, preempted = _answer(checkpoint, dtype, asks, axis, context)
        release(context.device)
        if expected is None:
            expected = traces
            continue
        differing = sum(a != b for a, b in zip(traces, expected, strict=True))
        shows = preempted or not axis.preempts
        name = axis.name if shows else f"{axis.name}: none happened"
        verdict = Verdict.of(differing == 0 and shows)
        if not axis.is_promised:
            verdict = Verdict.NONE
        lines.append(Line((dtype, name, str(len(asks)), str(differing)), verdict))
    return lines


def _axes(asks: list[Ask], context: Context) -> list[Axis]:
    """Return the plainest way first, with which all others are compared."""
    at_first = sum(-(-len(ask.prompt) // _BLOCK_SIZE) for ask in asks)
    tight = {"num_kv_blocks": at_first + 1, "max_num_batched_tokens": 4096}
    axes = [
        Axis("alone", alone=True),
        Axis("all in one batch"),
        Axis("prompts in chunks", {"max_num_batched_tokens": 32}),
        Axis("block size 32", {"block_size": 32}),
        Axis("preempted, swapped", {**tight, "preemption_mode": "swap"}, preempts=True),
        Axis("preempted, recomputed", {**tight, "preemption_mode": "recompute"}, preempts=True),
        Axis("prefixes cached", {"enable_prefix_caching": True}),
        Axis("the same once more"),
    ]
    if context.is_gpu:
        axes.append(Axis("without CUDA graphs", change_tools=eager))
        axes.append(Axis("not asynchronous", change_tools=synchronous))
        by_torch = {"deterministic": False}
        axes.append(Axis("all in one batch, products by torch", by_torch, is_promised=False))
    return axes


def _answer(
    checkpoint: Path, dtype: str, asks: list[Ask], axis: Axis, context: Context
) -> tuple[list[Trace], bool]:
    """Return the answers, and whether a sequence was preempted on the way."""
    longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks)
    options = {
        "model": str(checkpoint),
        "dtype": dtype,
        "block_size": _BLOCK_SIZE,
        "max_model_len": longest,
        "num_kv_blocks": len(asks) * -(-longest // _BLOCK_SIZE) + 1,
        "max_num_batched_tokens": 1024,
        **axis.options,
    }
    config = EngineConfig(**options_of(context.device, **options))
    engine = make_engine(config, change_tools=axis.change_tools)
    if axis.alone:
        return [answer(engine, [ask])[0] for ask in asks], False
    traces = answer(engine, asks)
    if config.enable_prefix_caching:  # now that they are in the cache
        traces = answer(engine, asks)
    return traces, engine.scheduler.num_preemptions > 0
