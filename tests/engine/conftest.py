"""Models for the engine's tests, and engines over them that count what happens on the way."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_image_models import IMAGES, save_image_model
from benchmarks.tiny_models import NATIVE, SHAPE, save_native
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from octavo.adapter import AdapterArrival
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.executor.prompt_scores import PromptScores
from octavo.executor.runner import Runner
from octavo.local.demo_model import demo_checkpoint
from octavo.request import Request, TokenLogprobs, TokenOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts
from octavo.sequence import NO_BLOCK, Sequence

Trace = list[tuple[int, TokenLogprobs]]
"""Each output token and its log-probabilities, to compare to the bit."""


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Give the memory of a module's engines back: they refer to themselves, so it would be late."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for the tiny models whose tokens are single bytes, but for the end of text."""
    letters, eos = sorted(pre_tokenizers.ByteLevel.alphabet()), SHAPE["eos_token_id"]
    names = [*letters[:eos], "<end>", *letters[eos:]]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny random checkpoints by family, and of the demo model as `demo`."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {"demo": demo_checkpoint()}
    for names, save in ((NATIVE, save_native), (IMAGES, save_image_model)):
        for name in names:
            save(name, root / name)
            made[name] = root / name
    return made


class CountingRunner:
    """A runner that counts what the engine has it do, and may seem to have fewer blocks."""

    def __init__(
        self, runner: Runner, num_blocks: int, num_host_blocks: int, steps_ahead: int
    ) -> None:
        assert num_blocks <= runner.num_blocks
        assert num_host_blocks <= runner.num_host_blocks
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self.max_model_len = runner.max_model_len
        self.window = runner.window
        self.adapters, self.num_adapter_slots = runner.adapters, runner.num_adapter_slots
        self.num_stages, self.steps_ahead = runner.num_stages, steps_ahead
        self.computes_on_host = runner.computes_on_host
        # Measured costs would make preemptions depend on the machine: swap more than 32 tokens.
        self.costs = PreemptionCosts(
            bytes_per_block=0, copy_bytes_per_s=1.0, copy_latency_s=1.0, prefill_tokens_per_s=16.0
        )
        self.counts: Counter[str] = Counter()
        self.last = SchedulerOutput(())
        self._runner = runner

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        counts, copies = self.counts, output.copies
        counts["most rows"] = max(counts["most rows"], len(output.scheduled))
        counts["chunks"] += sum(not item.draws for item in output.scheduled)
        counts["forks"] += sum(len(item.draws) > 1 for item in output.scheduled)
        counts["blocks out"] += len(copies.swap_out)
        counts["blocks copied"] += len(copies.copies)
        counts["swap-ins"] += len(copies.swap_in)
        counts["pending tokens"] += sum(
            item.sequence.num_pending_tokens for item in output.scheduled
        )
        counts["tokens scored"] += sum(len(prompt.token_ids) for prompt in output.scored)
        self.last = output
        logits = self._runner.execute(output, drawn)
        self.after_execute(output)
        return logits

    def finish(self) -> None:
        self._runner.finish()

    def wait(self) -> None:
        self._runner.wait()

    def pop_scores(self) -> PromptScores:
        return self._runner.pop_scores()

    def after_execute(self, output: SchedulerOutput) -> None:
        """Do nothing; a test may set something else."""

    def arrived(self) -> tuple[int, ...]:
        return self._runner.arrived()

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        return self._runner.arrived_adapters(timeout_s)


class EngineDriver:
    """Runs an engine to the end, counts what happens and checks that nothing leaks.

    Time is counted in steps.
    """

    def __init__(self, config: EngineConfig, runner: CountingRunner) -> None:
        self.now_s = 0
        self.engine = Engine(config, runner, clock=lambda: self.now_s)
        self.scheduler = self.engine.scheduler
        self.counts = runner.counts
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = {}
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.runner = runner

    def add(self, name: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        info = self.engine.info
        resolved = params.resolve(info.room_behind(len(prompt)), info.default_max_tokens)
        self.requests[name] = Request(name, tuple(prompt), resolved, **fields)
        self.engine.add(self.requests[name])
        for index in range(resolved.n):
            self.outputs[name, index] = []

    def add_all(self, asks: list[tuple[list[int], SamplingParams]], prefix: str = "") -> None:
        for index, (prompt, params) in enumerate(asks):
            self.add(f"{prefix}{index}", prompt, params)

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.aborted.add(name)

    def step(self) -> None:
        self.now_s += 1
        for output in self.engine.step().outputs:
            self.outputs[output.request_id, output.index].append(output)
        self._count()
        self.engine.check_integrity()

    def run(self, between_steps: Callable[[], None] = lambda: None) -> None:
        """Step until nothing is left, then check that no block is."""
        while self.engine.has_unfinished:
            self.step()
            between_steps()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_used_host_blocks == 0

    def preempt(self, sequence: Sequence) -> None:
        self.scheduler.preempt(sequence, self.now_s)

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [i for output in self.outputs[name, index] for i in output.token_ids]

    def trace(self, name: str, index: int = 0) -> Trace:
        return [
            pair
            for output in self.outputs[name, index]
            for pair in zip(output.token_ids, output.logprobs, strict=True)
        ]

    def prompt_logprobs(self, name: str) -> list[TokenLogprobs]:
        outputs = self.outputs[name, 0]
        first_tokens = next(i for i, output in enumerate(outputs) if output.token_ids)
        assert not any(output.prompt_logprobs for output in outputs[first_tokens:])
        return [each for output in outputs for each in output.prompt_logprobs]

    @property
    def num_hit_tokens(self) -> int:
        return self.engine.stats().num_prefix_hit_tokens_total

    def _count(self) -> None:
        """Count what only the scheduler knows after a step."""
        for swap_in in self.runner.last.copies.swap_in:
            # One that has never left the device can only come back from the second tier.
            if self.scheduler.restoring[swap_in.transfer_id].num_preemptions == 0:
                num_tokens = len(swap_in.pairs) * self.engine.info.block_size
                self.counts["host hit tokens"] += num_tokens
        tables = [sequence.block_table for sequence in self.scheduler.running]
        self.counts["blocks left behind"] += sum(table.count(NO_BLOCK) for table in tables)


@pytest.fixture(scope="session")
def drive() -> Callable[..., EngineDriver]:
    """Make a driver of an engine over a runner, which may seem to have fewer blocks."""

    def make(
        config: EngineConfig,
        runner: Runner,
        num_blocks: int,
        num_host_blocks: int,
        steps_ahead: int = 0,
    ) -> EngineDriver:
        counting = CountingRunner(runner, num_blocks, num_host_blocks, steps_ahead)
        return EngineDriver(config, counting)

    return make


@pytest.fixture
def make_driver(checkpoints: dict[str, Path], drive):
    """Make a driver over an engine of its own of the named checkpoint, with options."""

    def make(name: str, **options: Any) -> EngineDriver:
        values = {"num_kv_blocks": 512, "swap_space_bytes": 0, "cpu_threads": 2, **options}
        config = EngineConfig.from_mapping({"model": str(checkpoints[name]), **values})
        runner = ModelRunner(config)
        return drive(config, runner, runner.num_blocks, runner.num_host_blocks)

    return make


@pytest.fixture(scope="session")
def make_prompts():
    """Make seeded prompts of the given lengths."""

    def make(lengths: list[int], vocab_size: int = 331) -> list[list[int]]:
        generator = torch.Generator().manual_seed(len(lengths))
        return [
            torch.randint(8, vocab_size, (length,), generator=generator).tolist()
            for length in lengths
        ]

    return make
