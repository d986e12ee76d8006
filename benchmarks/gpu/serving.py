"""The part `serving`: while requests are served, nothing is compiled and the host never waits.

Compilations are counted by the Triton language's own hook, waits by torch's. A compilation counts
even if the machine code lies in a cache on disk: reading it takes time too.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu.context import Context
from gpu.engines import Ask, add_all, draw_asks, make_engine, options_of
from gpu.models import SMALL, TINY, random_model
from gpu.report import Line, Section, Verdict
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.request import Request
from octavo.sampling_params import SamplingParams

_SYNCHRONIZING = "called a synchronizing CUDA operation"


def serving(context: Context) -> list[Section]:
    """Serve requests of every kind on a model that is loaded, and count."""
    size = SMALL if context.is_gpu else TINY
    options = {
        "model": "random",
        "max_num_seqs": 24,
        "max_num_batched_tokens": 256,
        "max_model_len": size.max_position_embeddings,
        "num_kv_blocks": 260 if context.is_gpu else 40,  # too few for all, so that some move out
        "preemption_mode": "swap",
    }
    config = EngineConfig(**options_of(context.device, **options))
    engine = make_engine(config, load=random_model(size, torch.bfloat16, context.device))
    top = size.max_position_embeddings
    lengths = [1, 3, 15, 16, 17, 63, 100, 255, 256, 257, top // 2, top - 40] * 2
    num_tokens = 40 if context.is_gpu else 24
    asks = draw_asks(lengths[: 24 if context.is_gpu else 12], num_tokens, size.vocab_size)
    # All of these fit at first, and not when they have grown.
    growing = draw_asks([160] * 24 if context.is_gpu else [20] * 16, num_tokens, size.vocab_size)
    with _counting_compilations() as compiled, _counting_waits(context) as waits:
        num_steps = _serve(engine, asks) + _serve(engine, growing)
    num_moved = engine.scheduler.num_swap_preemptions
    lines = [
        Line(("steps", str(num_steps), "")),
        Line(("sequences that moved to the host", str(num_moved), ""), Verdict.of(num_moved > 0)),
        _line("kernels compiled or loaded", compiled),
        _line("waits for the device", waits),
    ]
    notes = () if context.is_gpu else ("On a CPU there is nothing to count.",)
    return [Section("Serving after load", ("", "number", "which"), tuple(lines), notes)]


def _line(what: str, counted: Counter[str]) -> Line:
    which = ", ".join(f"{name} ({count})" for name, count in counted.most_common(8))
    return Line((what, str(counted.total()), which), Verdict.of(not counted))


def _serve(engine: Engine, asks: list[Ask]) -> int:
    """Serve all, some of which come later, and return the number of steps."""
    add_all(engine, asks[::2])
    num_steps, late = 0, list(enumerate(asks[1::2]))
    while engine.has_unfinished:
        if late and num_steps % 3 == 0:
            index, ask = late.pop()
            engine.add(Request(f"late {index}", ask.prompt, _filtered(ask), time.monotonic()))
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        num_steps += 1
    return num_steps


def _filtered(ask: Ask) -> SamplingParams:
    """Return parameters by which a row takes the longer ways through the sampler."""
    kept = {"seed": ask.params.seed, "max_tokens": ask.params.max_tokens, "ignore_eos": True}
    return SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, **kept)  # type: ignore[arg-type]


@contextmanager
def _counting_compilations() -> Iterator[Counter[str]]:
    """Count each kernel that is compiled, or loaded from a cache on disk, within."""
    counted: Counter[str] = Counter()
    try:
        from triton import knobs
    except ImportError:  # no kernels, then
        yield counted
        return

    def count(**details: Any) -> None:
        counted[details["fn"].name] += 1

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = count
    try:
        yield counted
    finally:
        knobs.runtime.jit_post_compile_hook = before


@contextmanager
def _counting_waits(context: Context) -> Iterator[Counter[str]]:
    """Count each operation of torch that makes the host wait for the device within."""
    counted: Counter[str] = Counter()
    if not context.is_gpu:
        yield counted
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counted
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if _SYNCHRONIZING in str(warning.message):
            counted[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
