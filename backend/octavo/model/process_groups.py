"""`ProcessGroups`: the ranks of a tensor group and the stages of a pipeline over torch.distributed.

The groups are this object's own, not torch's global one, so that several engines of one process are
apart. gloo moves the bytes of a CPU, NCCL those of CUDA devices. Knows nothing of models or steps.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from octavo.errors import EngineError
from octavo.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the ranks find each other."""

    store: Store
    """The same one for all ranks."""
    host: str
    """Address of this rank's machine as the others reach it."""
    timeout_s: float
    """How long to wait for another rank, at the start and in every operation."""


class ProcessGroups:
    """What one rank does together with others; see `Collectives` for the tensor group.

    All calls come from one thread.

    Args:
        shard: the rank's place.
        device: of all tensors.
        rendezvous: of all ranks; waits until those of the two groups are there.

    Raises:
        EngineError: a rank does not come, or, in any method, another rank is gone.
    """

    def __init__(self, shard: Shard, device: torch.device, rendezvous: Rendezvous) -> None:
        self.rank, self.size = shard.tp_rank, shard.tp_size
        self.sent_bytes = 0
        """What this rank has sent to others since the start."""
        self._shard = shard
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        self._peers = {rank: replace(shard, tp_rank=rank) for rank in ranks}
        self._gathers_at_once = device.type == "cuda"
        self._sends: deque[Any] = deque()
        tensor_place = (f"tensor-{shard.pp_stage}", shard.tp_rank, shard.tp_size)
        stage_place = (f"pipeline-{shard.tp_rank}", shard.pp_stage, shard.pp_size)
        try:
            self._tensor_group = _open(*tensor_place, device, rendezvous)
            self._pipeline = _open(*stage_place, device, rendezvous)
        except RuntimeError as error:
            raise EngineError(
                f"{shard} did not reach the other ranks of its tensor group and its pipeline "
                f"within {rendezvous.timeout_s:g} s: {_reason(error)}"
            ) from error

    def sum_(self, partial: torch.Tensor) -> None:
        """Replace partial sums by their sum; see Collectives."""
        if self.size == 1:
            return
        parts = self._exchange(partial)
        partial.copy_(functools.reduce(torch.add, parts[1:], parts[0].float()))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of all ranks on rank 0; see Collectives."""
        group = self._tensor_group
        if self.rank:
            self.sent_bytes += part.nbytes
            with self._losing(self._peers[0]):
                group.send([part], 0, 0).wait()
            return []
        parts = [part, *(torch.empty_like(part) for _ in self._peers)]
        for rank, peer in self._peers.items():
            with self._losing(peer):
                group.recv([parts[rank]], rank, 0).wait()
        return parts

    def send(self, residual: torch.Tensor) -> None:
        """Send a step's states to the same place of the next stage; return before they are there.

        Args:
            residual: contiguous; must not be written to afterwards.
        """
        self.sent_bytes += residual.nbytes
        stage = self._shard.pp_stage + 1
        with self._losing(replace(self._shard, pp_stage=stage)):
            # No more steps than stages are under way, so the oldest of these has been asked for.
            if len(self._sends) == self._shard.pp_size:
                self._sends.popleft().wait()
            self._sends.append(self._pipeline.send([residual], stage, 0))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Wait for what the stage before sends next; return it in `out`, contiguous."""
        stage = self._shard.pp_stage - 1
        with self._losing(replace(self._shard, pp_stage=stage)):
            self._pipeline.recv([out], stage, 0).wait()
        return out

    def _exchange(self, partial: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in order."""
        self.sent_bytes += (self.size - 1) * partial.nbytes
        together = partial.new_empty((self.size, *partial.shape))
        parts, group = list(together), self._tensor_group
        if self._gathers_at_once:
            group._allgather_base(together.flatten(0, 1), partial).wait()
            return parts
        # Of gloo, this takes a quarter of the time of its own gathering.
        parts[self.rank] = partial
        works = []
        for rank, peer in self._peers.items():
            with self._losing(peer):
                works.append((peer, group.recv([parts[rank]], rank, 0)))
                works.append((peer, group.send([partial], rank, 0)))
        for peer, work in works:
            with self._losing(peer):
                work.wait()
        return parts

    @contextmanager
    def _losing(self, peer: Shard) -> Iterator[None]:
        """Blame another rank for what fails meanwhile."""
        try:
            yield
        except RuntimeError as error:
            raise EngineError(f"{self._shard} lost {peer}: {_reason(error)}") from error


def _open(name: str, rank: int, size: int, device: torch.device, rendezvous: Rendezvous) -> Any:
    """Return the process group of a name; one of a single rank is never asked for anything."""
    if size == 1:
        return None
    store = PrefixStore(name, rendezvous.store)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, without the place in the source it came from."""
    return re.sub(r"^\[\S*\] *", "", str(error).strip()).split(". ")[0].splitlines()[0]
