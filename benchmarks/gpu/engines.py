"""Engines over random models, and the answers that they give.

Knows the engine from outside: requests in, tokens out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.device_tools import DeviceTools, make_device_tools
from octavo.executor.model_runner import ModelLoader, ModelRunner, ToolsMaker
from octavo.model.loader import load_model
from octavo.request import Request
from octavo.sampling_params import SamplingParams

Trace = list[tuple[int, float]]
"""(token id, log-probability) of each output token."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how it is answered."""

    prompt: tuple[int, ...]
    params: SamplingParams


def draw_asks(
    lengths: Iterable[int],
    num_tokens: int,
    vocab_size: int,
    *,
    greedy: bool = False,
    logprobs: bool = True,
) -> list[Ask]:
    """Return random prompts of these lengths, all answered by `num_tokens` tokens.

    Unless all are greedy, every other one is sampled, by a seed of its own.
    """
    generator = torch.Generator().manual_seed(4)
    asks = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        is_greedy = greedy or index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if is_greedy else 0.8,
            top_p=1.0 if is_greedy else 0.95,
            seed=index,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
        )
        asks.append(Ask(tuple(ids), params))
    return asks


def make_engine(
    config: EngineConfig,
    *,
    load: ModelLoader = load_model,
    change_tools: Callable[[DeviceTools], DeviceTools] = lambda tools: tools,
) -> Engine:
    """Return an engine whose runner uses its device's tools, changed."""
    make: ToolsMaker = lambda *arguments: change_tools(make_device_tools(*arguments))  # noqa: E731
    return Engine(config, ModelRunner(config, make_tools=make, load=load))


def eager(tools: DeviceTools) -> DeviceTools:
    """Run decode steps like all others."""
    return replace(tools, make_graphs=None)


def synchronous(tools: DeviceTools) -> DeviceTools:
    """Plan a step when the one before it is done."""
    return replace(tools, steps_ahead=0)


def add_all(engine: Engine, asks: Sequence[Ask]) -> None:
    """Queue all requests, named by their place."""
    for index, ask in enumerate(asks):
        engine.add(Request(str(index), ask.prompt, ask.params, time.monotonic()))


def answer(engine: Engine, asks: Sequence[Ask]) -> list[Trace]:
    """Send all requests at once and return their answers.

    Raises:
        RuntimeError: One of them ended by an error.
    """
    traces: list[Trace] = [[] for _ in asks]
    add_all(engine, asks)
    while engine.has_unfinished:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            trace = traces[int(output.request_id)]
            trace += [(own.token_id, own.logprob) for own, *_ in output.logprobs]
    return traces


def release(device: torch.device) -> None:
    """Give the device back the memory of engines that are no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def options_of(device: torch.device, **options: Any) -> dict[str, Any]:
    """Return options of a small engine, on one thread where it runs on a CPU."""
    return {
        "device": str(device),
        "cpu_threads": 1,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "swap_space_bytes": 256 << 20,
        **options,
    }
