"""The part `steps`: whole decode steps of an engine against the bandwidth floor.

No step can be faster than it takes to read all weights once, and each sequence's keys and values,
at the rate of a copy. The model has random weights, made on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.ceilings import copy_bytes_per_s
from gpu.context import Context
from gpu.engines import Ask, draw_asks, options_of, release
from gpu.models import LLAMA_8B, TINY, ModelSize, random_model, weight_bytes
from gpu.report import Line, Section, Verdict, unmeasured_line
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.request import FinishReason, Request
from octavo.scheduler.output import SchedulerOutput

_TARGETS = {1: 0.85, 32: 0.75, 256: 0.75}
"""By sequences of the batch: the floor's share of a step, at least."""
_WARM_UPS, _STEPS, _REPEATS = 5, 30, 20
_TIMES = ("step, ms", "tokens/s", "floor, ms", "floor's share", "forward, ms", "gap")
_HEADS = ("products", "batch", *_TIMES)


class RepeatingRunner:
    """A runner that can run a step's forward pass many times, to time it without the host.

    A forward pass writes what it wrote before, so that nothing notices.
    """

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self._repeats = 0
        self.forward_s = 0.0
        """Device time of one forward pass, from the last step that was repeated."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def repeat(self, repeats: int) -> None:
        """Repeat the forward pass of the next step so often."""
        self._repeats = repeats

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        """Run a step; see Runner."""
        logits = self._runner.execute(output, drawn)
        if self._repeats:
            self.forward_s = self._time(output, drawn, self._repeats)
            self._repeats = 0
        return logits

    def _time(self, output: SchedulerOutput, drawn: torch.Tensor | None, repeats: int) -> float:
        if self._device.type == "cpu":
            started_s = time.perf_counter()
            for _ in range(repeats):
                self._runner.execute(output, drawn)
            return (time.perf_counter() - started_s) / repeats
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            self._runner.execute(output, drawn)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


def steps(context: Context) -> list[Section]:
    """Time decode steps at each batch size, with the engine's own products and with torch's."""
    size, length = (LLAMA_8B, 1024) if context.is_gpu else (TINY, 24)
    ceiling = copy_bytes_per_s(context.device)
    lines = []
    for deterministic in (True,) if context.quick else (True, False):
        lines += _lines(size, length, ceiling, context, deterministic=deterministic)
        release(context.device)
    notes = (
        f"A random Llama of {size.num_hidden_layers} layers of {size.hidden_size} in bfloat16, "
        f"prompts of {length:,} tokens, greedy. The floor is the bytes of weights, keys and "
        f"values at {ceiling / 1e9:,.0f} GB/s. The forward pass is timed by itself, launched over "
        "and over; the gap is the rest of a step: choosing tokens, and the device waiting. "
        "Products by `linear` are those of `deterministic=true`.",
    )
    return [Section("Decode steps", _HEADS, tuple(lines), notes, is_speed=True)]


def _lines(
    size: ModelSize, length: int, ceiling: float, context: Context, *, deterministic: bool
) -> list[Line]:
    batches = (1, 32, 256) if context.is_gpu else (1, 4)
    budget = 8192 if context.is_gpu else 64  # tokens of a step while prompts are computed
    num_new = answer_length(max(batches) * length, budget)
    longest = length + num_new
    options = {
        "model": "random",
        "deterministic": deterministic,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": budget,
        "max_model_len": longest,
        "num_kv_blocks": max(batches) * -(-longest // 16) + 1,
    }
    config = EngineConfig(**options_of(context.device, **options))
    loaded = ModelRunner(config, load=random_model(size, torch.bfloat16, context.device))
    runner = RepeatingRunner(loaded, context.device)
    engine = Engine(config, runner)
    lines = []
    for batch in batches:
        products = "linear" if deterministic else "torch"
        if context.is_late:
            lines.append(unmeasured_line((products, str(batch)), _HEADS))
            continue
        asks = draw_asks([length] * batch, num_new, size.vocab_size, greedy=True, logprobs=False)
        timed = time_steps(engine, asks, context.device, lambda: runner.repeat(_REPEATS))
        line = _line(batch, timed, runner.forward_s, ceiling, size)
        lines.append(Line((products, *line.cells), line.verdict))
    return lines


def answer_length(prompt_tokens: int, budget: int) -> int:
    """Return a longer answer than is waited for: who begins first goes on while others begin."""
    return _WARM_UPS + _STEPS + 10 + 2 * (prompt_tokens // budget + 1)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Steps in which all sequences decode."""

    seconds: float
    """Of one step."""
    num_tokens: float
    """Tokens whose keys and values a step reads, of all sequences, on average."""


def time_steps(
    engine: Engine,
    asks: list[Ask],
    device: torch.device,
    prepare: Callable[[], object] = lambda: None,
) -> TimedSteps:
    """Time decode steps of these requests alone, and end them; one step follows `prepare`."""
    for index, ask in enumerate(asks):
        engine.add(Request(f"{len(asks)} {index}", ask.prompt, ask.params, time.monotonic()))
    started: set[str] = set()
    while len(started) < len(asks):
        started |= {output.request_id for output in engine.step().outputs}
    for _ in range(_WARM_UPS):
        engine.step()
    prepare()
    engine.step()
    running = engine.scheduler.running
    num_before = sum(sequence.num_computed_tokens for sequence in running)
    _wait(device)
    started_s = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    _wait(device)
    seconds = (time.perf_counter() - started_s) / _STEPS
    if len(running) != len(asks):
        raise RuntimeError(f"{len(running)} sequences decoded but {len(asks)} were meant to")
    for index in range(len(asks)):
        engine.abort(f"{len(asks)} {index}", FinishReason.ABORT)
    while engine.has_unfinished:
        engine.step()
    return TimedSteps(seconds, num_before + len(asks) * (_STEPS + 1) / 2)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(batch: int, timed: TimedSteps, forward_s: float, ceiling: float, size: ModelSize) -> Line:
    head_dim = size.hidden_size // size.num_attention_heads
    token_bytes = 4 * size.num_hidden_layers * size.num_key_value_heads * head_dim
    step_s = timed.seconds
    floor_s = (weight_bytes(size, 2) + timed.num_tokens * token_bytes) / ceiling
    share, target = floor_s / step_s, _TARGETS.get(batch)
    has_target = target is not None and size is LLAMA_8B
    wanted = f" (target {target:.0%})" if has_target else ""
    figures = (
        f"{step_s * 1e3:.2f}",
        f"{batch / step_s:,.0f}",
        f"{floor_s * 1e3:.2f}",
        f"{share:.0%}{wanted}",
        f"{forward_s * 1e3:.2f}",
        f"{max(0.0, 1 - forward_s / step_s):.0%}",
    )
    verdict = Verdict.of(share >= (target or 0.0)) if has_target else Verdict.NONE
    return Line((str(batch), *figures), verdict)
