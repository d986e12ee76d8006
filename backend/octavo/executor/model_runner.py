"""One device's model and KV cache: a `SchedulerOutput` in, logits of the sampling rows out.

Knows nothing of queues, text or finish reasons.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from octavo.adapter import AdapterArrival
from octavo.cache.block_copies import BlockCopies
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.adapter_loads import AdapterLoads, ArrivedAdapters
from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.executor.block_transfers import BlockTransfers, make_block_transfers
from octavo.executor.copy_rate import measure_costs
from octavo.executor.device_inputs import StepSizes
from octavo.executor.device_tools import DeviceTools, make_device_tools
from octavo.executor.graphs import DecodeGraphs, batch_sizes, estimate_graph_bytes, is_decode
from octavo.executor.kv_storage import (
    choose_num_blocks,
    choose_num_host_blocks,
    free_bytes,
    peak_bytes,
)
from octavo.executor.prompt_scores import PromptScores
from octavo.executor.warm_up import WarmUpSteps
from octavo.host_resources import host_memory, usable_cores
from octavo.model.interface import CausalModel, ServedModel
from octavo.model.tiers import load_served_model
from octavo.scheduler.output import SchedulerOutput, ScoredPrompt
from octavo.scheduler.preemption import PreemptionCosts
from octavo_kernels import AttentionBackend, KVCache

logger = logging.getLogger(__name__)

TransfersMaker = Callable[[AttentionBackend, KVCache, KVCache], BlockTransfers]
"""Makes the transfers between a device's cache and the host's."""
ToolsMaker = Callable[[torch.device, CausalModel[Any], StepSizes], DeviceTools]
"""Makes the tools of a device for a model."""
ModelLoader = Callable[[EngineConfig], ServedModel]
"""Finds the model that an engine is configured for."""


class ModelRunner:
    """Load the model, size the KV cache, and run steps.

    All work is queued on the device's current stream.

    Args:
        make_transfers: by default, what suits the device.
        make_tools: the same.
        load: by default, what reads the checkpoint that `config` names.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
    """

    connections: tuple[Connection, ...] = ()

    def __init__(
        self,
        config: EngineConfig,
        make_transfers: TransfersMaker = make_block_transfers,
        make_tools: ToolsMaker = make_device_tools,
        load: ModelLoader = load_served_model,
    ) -> None:
        started_s = time.monotonic()
        torch.set_num_threads(config.cpu_threads or usable_cores())
        model = load(config)
        attention, self._decoder, self._device = model.attention, model.decoder, model.device
        self.vocab_size = model.spec.vocab_size
        self.eos_token_ids = model.spec.eos_token_ids
        self.max_model_len = model.max_model_len
        self.adapters, self.num_adapter_slots = model.adapters.named, model.adapters.num_slots
        self._arrived_adapters = ArrivedAdapters()
        self._loads = AdapterLoads(model.adapters.read, self._arrived_adapters.put)
        self.window = widest_window(model.spec.windows)
        sizes = StepSizes(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            model.max_model_len,
            config.block_size,
            model.adapters.num_slots,
        )
        self._scores: PromptScores | None = None
        # Kept between steps: to get as much memory from the system anew takes part of a step.
        self._logits = torch.empty((0, self.vocab_size), device=model.device)
        self._batch = BatchBuilder(*astuple(sizes))
        self._tools = make_tools(model.device, model.decoder, sizes)
        self.num_stages, self.steps_ahead = 1, self._tools.steps_ahead
        self.computes_on_host = model.device.type == "cpu"
        warm_up = WarmUpSteps(sizes)
        needed_bytes, prefill_tokens_per_s = self._warm_up(warm_up)
        needed_bytes += self._estimate_graph_bytes(config.max_num_seqs)
        memory = host_memory()
        self.num_blocks = choose_num_blocks(
            config, attention.shape, self._device, memory, needed_bytes
        )
        self.num_host_blocks = choose_num_host_blocks(config, attention.shape, self._device, memory)
        self._kv_cache = attention.allocate(self.num_blocks)
        host_cache = attention.allocate(self.num_host_blocks, host=True)
        self._transfers = make_transfers(attention, self._kv_cache, host_cache)
        self.costs = self._measure_costs(attention.shape.bytes_per_block, prefill_tokens_per_s)
        self._graphs = self._record_graphs(config.max_num_seqs)
        logger.info("model ready in %.1f s: %s", time.monotonic() - started_s, self._describe())

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Make the step's block copies and begin its adapters' loads, then run one forward pass.

        On a GPU this returns before the step is done, and waits for no step before it. With nothing
        scheduled, wait until a swap-in that is under way has arrived.

        Args:
            output: the step.
            drawn: [rows] int64, what the step before drew; needed if `output` has pending tokens.

        Returns:
            logits [num_samples, vocab_size] float32, in the order of `output.sampling`, overwritten
            by the next step.
            Mutates the KV cache at the slots of the scheduled tokens and the targets of copies.
        """
        self._transfers.start(output.copies)
        self._loads.start(output.loads)
        if not output.scheduled:
            self._transfers.wait()
            return torch.empty((0, self.vocab_size), device=self._device)
        inputs = self._batch.build(output)
        if self._graphs is not None and inputs.adapted is None and is_decode(inputs):
            return self._graphs.run(inputs, drawn)
        return self._forward(inputs, drawn, self._kv_cache, output.scored)

    def finish(self) -> None:
        """Do nothing more: the whole step is on the device."""

    def wait(self) -> None:
        """Do nothing: a step depends on no other process."""

    def pop_scores(self) -> PromptScores:
        """Return what the last step found out of its `output.scored`, which must not be empty."""
        scores, self._scores = self._scores, None
        assert scores is not None, "the last step scored nothing"
        return scores

    def arrived(self) -> tuple[int, ...]:
        """Return the transfer ids of swap-ins that are done, each once."""
        return self._transfers.arrived()

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        """Return what has become of adapters that were to be read; see Runner."""
        return self._arrived_adapters.pop(timeout_s)

    def check_processes(self) -> None:
        """Do nothing: no other process takes part."""

    def _forward(
        self,
        inputs: BatchInputs,
        drawn: torch.Tensor | None,
        kv_cache: KVCache,
        scored: tuple[ScoredPrompt, ...],
    ) -> torch.Tensor:
        inputs, decoder = self._tools.inputs.put(inputs, drawn), self._decoder
        states = decoder.run(
            *(inputs.token_ids, inputs.positions, kv_cache, inputs.attention, inputs.adapted)
        )
        if scored:
            project = functools.partial(decoder.project, states)
            self._scores = PromptScores(scored, project, self._device)
        num_rows = len(inputs.logits_rows)
        if num_rows > len(self._logits):
            self._logits = torch.empty((num_rows, self.vocab_size), device=self._device)
        return decoder.project(states, inputs.logits_rows, self._logits[:num_rows])

    def _warm_up(self, steps: WarmUpSteps) -> tuple[int, float]:
        """Run every kind of step in a small cache, so that all of it is built and loaded.

        Returns the bytes of GPU memory that steps take at most, and the tokens per second of as
        long a prompt as is soon computed.
        """
        kv_cache = self._decoder.attention.allocate(steps.num_blocks)
        drawn = torch.zeros(1, dtype=torch.int64, device=self._device)
        pending = torch.zeros(1, 2, dtype=torch.int64)

        def run(output: SchedulerOutput) -> torch.Tensor:
            # As if the first id were pending, for that too has its kernels.
            inputs = replace(self._batch.build(output), pending=pending)
            return self._forward(inputs, drawn, kv_cache, output.scored)

        needed_bytes = peak_bytes(self._device, lambda: steps.run_all(run))
        return needed_bytes, steps.measure_prefill(run)

    def _estimate_graph_bytes(self, max_num_seqs: int) -> int:
        make_graphs = self._tools.make_graphs
        if make_graphs is None:
            return 0
        kv_cache = self._decoder.attention.allocate(1)
        return estimate_graph_bytes(
            lambda: make_graphs(self._decoder, kv_cache),
            batch_sizes(max_num_seqs),
            lambda: free_bytes(self._device),
        )

    def _record_graphs(self, max_num_seqs: int) -> DecodeGraphs | None:
        if self._tools.make_graphs is None:
            return None
        try:
            graphs = self._tools.make_graphs(self._decoder, self._kv_cache)
            graphs.record(batch_sizes(max_num_seqs))
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"a KV cache of {self.num_blocks:,} blocks leaves too little GPU memory to record "
                f"decode steps of up to {max_num_seqs} sequences; lower gpu_memory_utilization, "
                "kv_cache_memory_bytes or num_kv_blocks, whichever is given"
            ) from None
        return graphs

    def _describe(self) -> str:
        """Say what was chosen, for the log."""
        graphs = "" if self._graphs is None else f"{len(self._graphs.sizes)} decode graphs, "
        return (
            f"{self._decoder.spec.architecture} on {self._device}, "
            f"attention {self._decoder.attention.name}, {graphs}{self.num_blocks:,} KV blocks"
        )

    def _measure_costs(self, bytes_per_block: int, prefill_tokens_per_s: float) -> PreemptionCosts:
        if self.num_blocks > 1:
            self._transfers.start(BlockCopies(copies=((0, 1),)))
        num_blocks = min(self.num_blocks, self.num_host_blocks)
        return measure_costs(self._transfers, num_blocks, bytes_per_block, prefill_tokens_per_s)


def widest_window(windows: tuple[int | None, ...]) -> int | None:
    """Return how many last tokens any layer sees, or None if some layer sees all."""
    widest = 0
    for window in windows:
        if window is None:
            return None
        widest = max(widest, window)
    return widest
