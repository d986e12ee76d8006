"""One device's model and KV cache: a `SchedulerOutput` in, logits of the sampling rows out.

Knows nothing of queues, text or finish reasons.
"""

from __future__ import annotations

import logging
import os
import time

import psutil
import torch

from octavo.config import EngineConfig
from octavo.executor.batch import BatchBuilder, BatchInputs
from octavo.executor.kv_storage import choose_num_blocks
from octavo.model.loader import load_model
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence
from octavo_kernels import KVCache

logger = logging.getLogger(__name__)


class ModelRunner:
    """Load the model, size the KV cache, and run steps.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        started_s = time.monotonic()
        torch.set_num_threads(config.cpu_threads or _usable_cores())
        model = load_model(config)
        self._decoder = model.decoder
        self._device = model.device
        self.vocab_size = model.spec.vocab_size
        self.eos_token_ids = model.spec.eos_token_ids
        self.max_model_len = model.max_model_len
        self._batch = BatchBuilder(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.block_size,
        )
        self._profile(min(config.max_num_batched_tokens, self.max_model_len), config.block_size)
        self.num_blocks = choose_num_blocks(config, model.attention.shape, self._device)
        self._kv_cache = model.attention.allocate(self.num_blocks)
        logger.info(
            "model ready in %.1f s: %s, attention %s",
            time.monotonic() - started_s,
            model.spec.architecture,
            model.attention.name,
        )

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """Run one forward pass.

        Returns:
            logits [num_samples, vocab_size] float32, in the order of `output.sampling`.
            Mutates the KV cache at the slots of the scheduled tokens.
        """
        return self._forward(self._batch.build(output), self._kv_cache)

    def _forward(self, inputs: BatchInputs, kv_cache: KVCache) -> torch.Tensor:
        inputs = inputs.to(self._device)
        return self._decoder.forward(
            inputs.token_ids, inputs.positions, kv_cache, inputs.attention, inputs.logits_rows
        )

    def _profile(self, num_tokens: int, block_size: int) -> None:
        """Run the largest step once, so that kernels are built and peak memory is reached."""
        sequence = Sequence(Request("profile", (0,) * num_tokens, SamplingParams()))
        num_blocks = -(-num_tokens // block_size)
        sequence.block_table = list(range(num_blocks))
        share = ScheduledSequence(sequence, num_tokens, samples=True)
        inputs = self._batch.build(SchedulerOutput((share,)))
        self._forward(inputs, self._decoder.attention.allocate(num_blocks))


def _usable_cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
