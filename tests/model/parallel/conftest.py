"""Models whose ranks are threads of this process, and move real bytes over gloo."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from octavo.config import EngineConfig
from octavo.model.loader import LoadedModel, load_model
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import Shard

TIMEOUT_S = 20.0


@dataclass
class Rank:
    shard: Shard
    groups: ProcessGroups
    model: LoadedModel

    def forward(self, token_ids, positions, kv_cache, metadata, rows):
        """Do one step's part of this rank; return logits on rank 0."""
        decoder, shard = self.model.decoder, self.shard
        if shard.is_first_stage:
            residual = decoder.embed(token_ids)
        else:
            shape = (len(token_ids), self.model.spec.hidden_size)
            residual = self.groups.receive(torch.empty(shape, dtype=self.model.dtype))
        states = decoder.run_layers(residual, positions, kv_cache, metadata)
        if shard.is_last_stage:
            return decoder.project(states, rows)
        self.groups.send(states.total())
        return None


class ManyRanks:
    """A model over several ranks, with as much of a LoadedModel as a paged driver needs."""

    def __init__(self, config: EngineConfig, tp_size: int, pp_size: int):
        store, size = dist.HashStore(), tp_size * pp_size

        def start(rank):
            shard = Shard.of(rank, tp_size, pp_size)
            rendezvous = Rendezvous(store, "127.0.0.1", TIMEOUT_S)
            groups = ProcessGroups(shard, torch.device("cpu"), rendezvous)
            return Rank(shard, groups, load_model(config, shard, groups))

        # As many threads as wait for each other; more of them each would fight for the cores.
        self._pool = ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,))
        self.ranks = list(self._pool.map(start, range(size)))
        self.attention = self.decoder = self
        self.shape = self.ranks[0].model.attention.shape

    def allocate(self, num_blocks):
        return [rank.model.attention.allocate(num_blocks) for rank in self.ranks]

    def forward(self, token_ids, positions, kv_caches, metadata, rows):
        def step(rank, kv_cache):
            return rank.forward(token_ids, positions, kv_cache, metadata, rows)

        logits, *others = self._pool.map(step, self.ranks, kv_caches)
        assert all(other is None or len(other) == 0 for other in others)
        return logits


@pytest.fixture
def load_ranks():
    """Return a function: load a checkpoint directory over some ranks."""

    def load(directory, tp_size, pp_size=1, dtype="float32", **options):
        config = EngineConfig(model=str(directory), dtype=dtype, device="cpu", **options)
        return ManyRanks(config, tp_size, pp_size)

    return load
