"""One device's model and KV cache: a `SchedulerOutput` in, logits of the sampling rows out.

Knows nothing of queues, text or finish reasons.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

import psutil
import torch

from octavo.config import EngineConfig
from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.executor.block_transfers import BlockTransfers, make_block_transfers
from octavo.executor.copy_rate import CopyRate, measure_copy_rate
from octavo.executor.kv_storage import choose_num_blocks, choose_num_host_blocks
from octavo.model.loader import load_model
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts
from octavo.sequence import Sequence
from octavo_kernels import AttentionBackend, KVCache

logger = logging.getLogger(__name__)

TransfersMaker = Callable[[AttentionBackend, KVCache, KVCache], BlockTransfers]
"""Makes the transfers between a device's cache and the host's."""

#: How long the prefill rate is measured, about.
_MEASURED_PREFILL_S = 0.5


class ModelRunner:
    """Load the model, size the KV cache, and run steps.

    Args:
        make_transfers: by default, what suits the device.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
    """

    def __init__(
        self, config: EngineConfig, make_transfers: TransfersMaker = make_block_transfers
    ) -> None:
        started_s = time.monotonic()
        torch.set_num_threads(config.cpu_threads or _usable_cores())
        model = load_model(config)
        attention = model.attention
        self._decoder = model.decoder
        self._device = model.device
        self.vocab_size = model.spec.vocab_size
        self.eos_token_ids = model.spec.eos_token_ids
        self.max_model_len = model.max_model_len
        self.steps_ahead = 0 if self._device.type == "cpu" else 1
        self.window = widest_window(model.spec.windows)
        self._batch = BatchBuilder(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.block_size,
        )
        prefill_tokens_per_s = self._profile(
            min(config.max_num_batched_tokens, self.max_model_len), config.block_size
        )
        self.num_blocks = choose_num_blocks(config, attention.shape, self._device)
        self.num_host_blocks = choose_num_host_blocks(config, attention.shape)
        self._kv_cache = attention.allocate(self.num_blocks)
        host_cache = attention.allocate(self.num_host_blocks, host=True)
        self._transfers = make_transfers(attention, self._kv_cache, host_cache)
        self.costs = self._measure_costs(attention.shape.bytes_per_block, prefill_tokens_per_s)
        logger.info(
            "model ready in %.1f s: %s, attention %s",
            time.monotonic() - started_s,
            model.spec.architecture,
            attention.name,
        )

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Make the step's block copies, then run one forward pass.

        With nothing scheduled, wait until a swap-in that is under way has arrived.

        Args:
            output: the step.
            drawn: [rows] int64, what the step before drew; needed if `output` has pending tokens.

        Returns:
            logits [num_samples, vocab_size] float32, in the order of `output.sampling`.
            Mutates the KV cache at the slots of the scheduled tokens and the targets of copies.
        """
        self._transfers.start(output.copies)
        if not output.scheduled:
            self._transfers.wait()
            return torch.empty((0, self.vocab_size), device=self._device)
        return self._forward(self._batch.build(output), self._kv_cache, drawn)

    def arrived(self) -> tuple[int, ...]:
        """Return the transfer ids of swap-ins that are done, each once."""
        return self._transfers.arrived()

    def _forward(
        self, inputs: BatchInputs, kv_cache: KVCache, drawn: torch.Tensor | None = None
    ) -> torch.Tensor:
        inputs = inputs.to(self._device)
        if drawn is not None and len(inputs.pending):
            indices, rows = inputs.pending.unbind(1)
            inputs.token_ids[indices] = drawn[rows]
        return self._decoder.forward(
            inputs.token_ids, inputs.positions, kv_cache, inputs.attention, inputs.logits_rows
        )

    def _profile(self, num_tokens: int, block_size: int) -> float:
        """Run the largest step once, so that kernels are built and peak memory is reached.

        Returns the tokens per second of a second run, or of as much of it as is soon done.
        """
        first_s = self._time_prefill(num_tokens, block_size)
        num_measured = int(num_tokens * min(1.0, _MEASURED_PREFILL_S / first_s))
        num_measured = max(num_measured, min(num_tokens, block_size))
        return num_measured / self._time_prefill(num_measured, block_size)

    def _time_prefill(self, num_tokens: int, block_size: int) -> float:
        """Run a prompt of zeros in a cache of its own; return the seconds."""
        sequence = Sequence(Request("profile", (0,) * num_tokens, SamplingParams()))
        num_blocks = -(-num_tokens // block_size)
        sequence.block_table = list(range(num_blocks))
        share = ScheduledSequence(sequence, num_tokens, draws=(sequence,))
        kv_cache = self._decoder.attention.allocate(num_blocks)
        started_s = time.perf_counter()
        logits = self._forward(self._batch.build(SchedulerOutput((share,))), kv_cache)
        # A device computes behind the caller's back until its result is read.
        logits.argmax().item()
        return time.perf_counter() - started_s

    def _measure_costs(self, bytes_per_block: int, prefill_tokens_per_s: float) -> PreemptionCosts:
        num_blocks = min(self.num_blocks, self.num_host_blocks)
        copy = (
            measure_copy_rate(self._transfers, num_blocks, bytes_per_block)
            if num_blocks
            else CopyRate(bytes_per_s=math.inf, latency_s=math.inf)
        )
        return PreemptionCosts(
            bytes_per_block, copy.bytes_per_s, copy.latency_s, prefill_tokens_per_s
        )


def widest_window(windows: tuple[int | None, ...]) -> int | None:
    """Return how many last tokens any layer sees, or None if some layer sees all."""
    widest = 0
    for window in windows:
        if window is None:
            return None
        widest = max(widest, window)
    return widest


def _usable_cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
