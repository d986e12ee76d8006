"""Models that must give the same bits whatever happens, and the answers to expect of them.

A model here first answers each request alone, in the plainest way there is: its prompt whole, no
cache, no preemption, no forks. Whatever an engine does later is compared with that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.config import EngineConfig
from octavo.executor.block_transfers import DirectTransfers
from octavo.executor.model_runner import ModelRunner
from octavo.request import FinishReason, TokenLogprobs
from octavo.sampling.random import fork_seeds
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import SchedulerOutput
from octavo_kernels import AttentionBackend, KVCache
from octavo_kernels._native.library import native_library

Trace = list[tuple[int, TokenLogprobs]]
"""Each output token and its log-probabilities."""
Asks = list[tuple[list[int], SamplingParams]]
"""(prompt, parameters) of requests."""
BadWords = tuple[tuple[int, ...], ...]

#: The models that must give the same bits whatever happens.
TINY = [
    pytest.param(("llama", "float32"), id="llama-float32"),
    pytest.param(("llama", "bfloat16"), id="llama-bfloat16"),
    pytest.param(("qwen3", "float32"), id="qwen3-float32"),
    pytest.param(("qwen3_moe", "float32"), id="experts-float32"),
    pytest.param(("mistral", "float32"), id="mistral-window-float32"),
    pytest.param(("mistral", "bfloat16"), id="mistral-window-bfloat16"),
    pytest.param(
        ("llama", "bfloat16", "int8"),
        id="llama-int8",
        marks=pytest.mark.skipif(native_library() is None, reason="no native code is built here"),
    ),
]
DEMO = [
    pytest.param(("demo", "float32"), id="demo-float32"),
    pytest.param(("demo", "bfloat16"), id="demo-bfloat16"),
]


class SlowTransfers:
    """Block transfers whose swap-ins arrive only after `delay` more polls, and hold NaN until then.

    Waiting for one makes it arrive with the next poll.
    """

    def __init__(self, attention: AttentionBackend, device: KVCache, host: KVCache) -> None:
        self.delay = 0
        self.attention = attention
        self.device = device
        self.host = host
        self._direct = DirectTransfers(attention, device, host)
        self._under_way: deque[tuple[int, SwapIn]] = deque()
        self._num_polls = 0

    def start(self, copies: BlockCopies) -> None:
        coming = {pair[1] for _, swap_in in self._under_way for pair in swap_in.pairs}
        sources = {source for source, _ in (*copies.swap_out, *copies.copies)}
        targets = [pair[1] for swap_in in copies.swap_in for pair in swap_in.pairs]
        targets += [target for _, target in copies.copies]
        assert coming.isdisjoint(sources.union(targets)), "a block is used before it arrives"
        self._direct.start(replace(copies, swap_in=()))
        for swap_in in copies.swap_in:
            self.device.storage[[target for _, target in swap_in.pairs]] = math.nan
            self._under_way.append((self._num_polls + 1 + self.delay, swap_in))

    def arrived(self) -> tuple[int, ...]:
        self._num_polls += 1
        while self._under_way and self._under_way[0][0] <= self._num_polls:
            self._direct.start(BlockCopies(swap_in=(self._under_way.popleft()[1],)))
        return self._direct.arrived()

    def wait(self) -> None:
        if self._under_way:
            self._num_polls = max(self._num_polls, self._under_way[0][0] - 1)

    def forget_all(self, delay: int) -> None:
        """Begin anew, with NaN in all blocks, so that reading what nobody wrote is seen."""
        self._under_way.clear()
        self._direct.arrived()
        self.delay = delay
        self.device.storage.fill_(math.nan)
        self.host.storage.fill_(math.nan)


class ModelUnderTest:
    """One model in one dtype, loaded once, and the answers it gives to requests run alone."""

    def __init__(self, name: str, options: dict[str, Any], asks: Asks, drive: Any) -> None:
        self.name = name
        self.asks = asks
        """(prompt, parameters) of the requests that every test sends."""
        self._options = options
        # No more than the tests use: all of it is filled with NaN for each driver.
        self._num_tokens, self._host_bytes = (1024, 80 << 20) if name == "demo" else (4096, 4 << 20)
        self._drive = drive
        self._runners: dict[int, tuple[ModelRunner, SlowTransfers]] = {}
        self._prompts_alone: dict[tuple[tuple[int, ...], int], list[TokenLogprobs]] = {}
        self._alone: dict[tuple[tuple[int, ...], SamplingParams, BadWords], Trace] = {}

    def driver(
        self,
        *,
        num_blocks: int | None = None,
        num_host_blocks: int = 0,
        delay: int = 0,
        steps_ahead: int = 0,
        cpu_threads: int = 1,
        **options: Any,
    ) -> Any:
        """Make a driver of an engine with these options, whose memory holds NaN."""
        values = {"block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512, **options}
        config = EngineConfig(**self._options, **values)
        runner, transfers = self._loaded(config.block_size)
        torch.set_num_threads(cpu_threads)  # another test may have changed it
        transfers.forget_all(delay)
        num_blocks = num_blocks or self._num_tokens // config.block_size
        return self._drive(config, runner, num_blocks, num_host_blocks, steps_ahead)

    def alone(
        self, prompt: tuple[int, ...], params: SamplingParams, index: int, bad_words: BadWords = ()
    ) -> Trace:
        """Return what one request answers alone: the one whose seed is that of `index`."""
        seeds, indices = np.array([params.seed], np.int64), np.array([index], np.int64)
        seed = int(fork_seeds(seeds, indices)[0])
        params = replace(params, n=1, seed=seed, prompt_logprobs=None)
        key = (prompt, params, bad_words)
        if key not in self._alone:
            driver = self.driver(enable_prefix_caching=False)
            driver.add("alone", list(prompt), params, bad_words_token_ids=bad_words)
            driver.run()
            driver.counts.subtract({"most rows": 1, "blocks left behind": math.inf})
            assert not +driver.counts, "nothing happens to it"
            self._alone[key] = driver.trace("alone")
        return self._alone[key]

    def prompt_alone(self, prompt: tuple[int, ...], count: int) -> list[TokenLogprobs]:
        """Return what one prompt is told of itself alone."""
        if (prompt, count) not in self._prompts_alone:
            driver = self.driver(enable_prefix_caching=False)
            params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=count)
            driver.add("alone", list(prompt), params)
            driver.run()
            self._prompts_alone[prompt, count] = driver.prompt_logprobs("alone")
        return self._prompts_alone[prompt, count]

    def check(self, driver: Any) -> None:
        """Compare every answer with the one given alone, as far as it was given."""
        for (name, index), outputs in driver.outputs.items():
            request = driver.requests[name]
            expected = self.alone(
                request.prompt_token_ids, request.params, index, request.bad_words_token_ids
            )
            trace = driver.trace(name, index)
            reason = outputs[-1].finish_reason if outputs else None
            if name in driver.aborted or reason is FinishReason.DEADLINE:
                expected = expected[: len(trace)]
            else:
                assert reason is FinishReason.LENGTH, (name, index)
            assert trace == expected, (name, index)
            told = [each for output in outputs for each in output.prompt_logprobs]
            count = request.params.prompt_logprobs
            if index == 0 and count is not None:
                of_prompt = self.prompt_alone(request.prompt_token_ids, count)
                assert told == (of_prompt if trace else of_prompt[: len(told)]), name
            else:
                assert told == [], (name, index)

    def spoil(self, output: SchedulerOutput, block_size: int = 16) -> None:
        """Write NaN where a step wrote, as if its device had failed on the way."""
        transfers = self._runners[block_size][1]
        slots = [
            sequence.block_table[position // block_size] * block_size + position % block_size
            for sequence, count, _ in output.scheduled
            for position in range(
                sequence.num_computed_tokens, sequence.num_computed_tokens + count
            )
        ]
        shape = transfers.attention.shape
        nan = torch.full((len(slots), shape.num_kv_heads, shape.head_dim), math.nan)
        nan = nan.to(shape.dtype)
        for layer in range(shape.num_layers):
            transfers.attention.write_kv_cache(
                nan, nan, transfers.device, layer, torch.tensor(slots)
            )

    def _loaded(self, block_size: int) -> tuple[ModelRunner, SlowTransfers]:
        if block_size not in self._runners:
            config = EngineConfig(
                **self._options,
                block_size=block_size,
                num_kv_blocks=self._num_tokens // block_size,
                swap_space_bytes=self._host_bytes,
                max_num_seqs=32,
                max_num_batched_tokens=2048,
            )
            made: list[SlowTransfers] = []

            def make_transfers(*args: Any) -> SlowTransfers:
                made.append(SlowTransfers(*args))
                return made[0]

            self._runners[block_size] = (ModelRunner(config, make_transfers), made[0])
        return self._runners[block_size]


def _asks(make_prompts: Any, is_slow: bool) -> Asks:
    """Prompts of many lengths, some that begin alike, greedy and seeded, for 1 to 3 answers."""
    prompts = make_prompts([70, 5, 33, 16, 120, 1, 47, 64])
    prompts += [prompts[0][:48] + prompts[1], prompts[4][:112] + prompts[2], prompts[7]]
    answers = [1, 3, 1, 1, 2, 1, 2, 1, 1, 1, 3]
    asks = []
    for index, (prompt, n) in enumerate(zip(prompts, answers, strict=True)):
        values = {"n": n, "seed": 11 + index, "max_tokens": 6 if is_slow else 20}
        drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 50} if index % 2 else {"temperature": 0}
        params = SamplingParams(**values, **drawn, ignore_eos=True, logprobs=index % 4)
        asks.append((prompt, params))
    return [asks[index] for index in (0, 1, 3, 8)] if is_slow else asks


@pytest.fixture(scope="session")
def load_model(checkpoints, drive, make_prompts) -> Callable[..., ModelUnderTest]:
    """Return the model of a name in a dtype, loaded on first use."""

    @cache
    def load(name: str, dtype: str, quantization: str = "none") -> ModelUnderTest:
        options = {
            "model": str(checkpoints[name]),
            "dtype": dtype,
            "quantization": quantization,
            "cpu_threads": 1,
            "max_model_len": 512,
        }
        return ModelUnderTest(name, options, _asks(make_prompts, name == "demo"), drive)

    return load


@pytest.fixture(params=TINY)
def tiny(request, load_model) -> ModelUnderTest:
    """Each tiny model."""
    return load_model(*request.param)


@pytest.fixture(params=DEMO)
def demo(request, load_model) -> ModelUnderTest:
    """The demo model in each dtype; it takes its time."""
    return load_model(*request.param)


@pytest.fixture(params=TINY + DEMO)
def model(request, load_model) -> ModelUnderTest:
    """Each model."""
    return load_model(*request.param)
