"""One rank's part of a model and of its KV cache, which runs the steps that it is told of.

Knows nothing of sequences beyond what messages say, of sampling, or of how ranks are started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
import torch

from octavo.adapter import AdapterArrival
from octavo.config import EngineConfig
from octavo.executor.adapter_loads import AdapterLoads
from octavo.executor.batch import BatchBuilder
from octavo.executor.block_transfers import BlockTransfers, make_block_transfers
from octavo.executor.device_inputs import DeviceInputs, StepSizes
from octavo.executor.device_tools import make_device_inputs
from octavo.executor.kv_storage import choose_num_blocks, choose_num_host_blocks
from octavo.executor.parallel.step_message import StepMirror
from octavo.executor.prompt_scores import pieces_of
from octavo.executor.warm_up import WarmUpSteps
from octavo.host_resources import HostMemory, Limit, host_memory
from octavo.model.decoder import States
from octavo.model.loader import load_model
from octavo.model.process_groups import ProcessGroups
from octavo.model.shard import Shard
from octavo.sampling.device import to_device

InputsMaker = Callable[[torch.device, StepSizes], DeviceInputs]
"""Makes the way of every step's inputs to a device."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many KV blocks there are, on the device and on the host."""

    num_device: int
    num_host: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What the layers of the last stage made of a step."""

    states: States
    logits_rows: torch.Tensor
    """[num_samples] int64"""
    scored_rows: tuple[int, ...]


class Part:
    """Load a rank's part of a model; until `allocate`, it runs steps of the warm-up.

    Args:
        config: the options, the same for all ranks.
        shard: the rank's place.
        groups: its ways to the other ranks.
        device: where it computes; a CUDA device is the current one of this thread.
        tell: called with what has become of each adapter that steps have it read.
        make_inputs: makes the way of every step's inputs to the device.

    Raises:
        ConfigError: the checkpoint cannot be served, or not in so many parts.
    """

    def __init__(
        self,
        config: EngineConfig,
        shard: Shard,
        groups: ProcessGroups,
        device: torch.device,
        tell: Callable[[AdapterArrival], None],
        make_inputs: InputsMaker = make_device_inputs,
    ) -> None:
        model = load_model(config, shard, groups, device)
        self.model = model
        self.sizes = StepSizes(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            model.max_model_len,
            config.block_size,
            model.adapters.num_slots,
        )
        self._config = config
        self._shard = shard
        self._groups = groups
        self._batch = BatchBuilder(*astuple(self.sizes))
        self._inputs = make_inputs(device, self.sizes)
        self._mirror = StepMirror()
        self._loads = AdapterLoads(model.adapters.read, tell)
        self.transfers = self._make_cache(Blocks(WarmUpSteps(self.sizes).num_blocks, 0))
        """Maker of its block copies."""

    def choose_blocks(self, needed_bytes: int, num_ranks_here: int) -> Blocks:
        """Return how many blocks this rank has room for.

        Args:
            needed_bytes: what steps take.
            num_ranks_here: how many ranks share this machine.

        Raises:
            ConfigError: there is not so much memory.
        """
        where = (self.model.attention.shape, self.model.device)
        memory = share_of(host_memory(), num_ranks_here)
        return Blocks(
            choose_num_blocks(self._config, *where, memory, needed_bytes),
            choose_num_host_blocks(self._config, *where, memory),
        )

    def allocate(self, blocks: Blocks) -> None:
        """Replace the cache of the warm-up by one of so many blocks."""
        self.transfers = self._make_cache(blocks)

    @torch.inference_mode()
    def compute(self, message: bytes) -> Computed | None:
        """Make a step's copies, and run this rank's layers over its tokens; queue it all on a GPU.

        Adapters that it says are read meanwhile.

        They wait for the stage before, and what comes out is sent to the next. Returns what the
        last stage projects, or None on other stages and where nothing is scheduled.
        """
        step = self._mirror.hear(message)
        self.transfers.start(step.scheduled.copies)
        self._loads.start(step.scheduled.loads)
        if not step.scheduled.scheduled:
            return None
        inputs = self._inputs.put(self._batch.build(step.scheduled), None)
        states = self.model.decoder.run_layers(
            self._first_states(inputs.token_ids),
            *(inputs.positions, self._cache, inputs.attention, inputs.adapted),
        )
        if self._shard.is_last_stage:
            return Computed(states, inputs.logits_rows, step.scored_rows)
        self._groups.send(states.total())
        return None

    def serve(self, message: bytes) -> None:
        """Do this rank's part of a step, where it is not rank zero."""
        computed = self.compute(message)
        if computed is not None:
            scored = np.array(computed.scored_rows, dtype=np.int64)
            (rows,) = to_device([scored], self.model.device)
            project = self.model.decoder.project
            for piece in pieces_of(len(rows)):
                project(computed.states, rows[piece])
            project(computed.states, computed.logits_rows)
        self.transfers.arrived()  # rank zero alone says so

    def _first_states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the layers begin with, [num_tokens, hidden]."""
        model = self.model
        if self._shard.is_first_stage:
            return model.decoder.embed(token_ids)
        shape = (len(token_ids), model.spec.hidden_size)
        return self._groups.receive(torch.empty(shape, dtype=model.dtype, device=model.device))

    def _make_cache(self, blocks: Blocks) -> BlockTransfers:
        attention = self.model.attention
        self._cache = attention.allocate(blocks.num_device)
        host_cache = attention.allocate(blocks.num_host, host=True)
        return make_block_transfers(attention, self._cache, host_cache)


def share_of(memory: HostMemory, num_ranks: int) -> HostMemory:
    """Return what each of several ranks may take of a machine's memory."""

    def share(limit: Limit) -> Limit:
        return Limit(limit.amount // num_ranks, f"each of {num_ranks} ranks of {limit.source}")

    return HostMemory(share(memory.total), share(memory.free))
