"""`ProcessGroups`: the ranks of a tensor group and the stages of a pipeline over torch.distributed.

The groups are this object's own, not torch's global one, so that several engines of one process are
apart. gloo moves the bytes of a CPU, NCCL those of CUDA devices. Knows nothing of models or steps.
"""

from __future__ import annotations

import functools
from collections import deque
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
                f"within {rendezvous.timeout_s:g} s: {_first_line(error)}"
            ) from error

    def sum_(self, partial: torch.Tensor) -> None:
        """Replace partial sums by their sum; see Collectives."""
        if self.size == 1:
            return
        parts = self._exchange(partial)
        partial.copy_(functools.reduce(torch.add, parts[1:], parts[0].float()))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of all ranks on rank 0; see Collectives."""
        if self.rank:
            self.sent_bytes += part.nbytes
            self._wait(self._tensor_group.send([part], 0, 0), self._neighbour(0))
            return []
        others = [torch.empty_like(part) for _ in range(1, self.size)]
        for peer, other in enumerate(others, 1):
            self._wait(self._tensor_group.recv([other], peer, 0), self._neighbour(peer))
        return [part, *others]

    def send(self, residual: torch.Tensor) -> None:
        """Send a step's states to the same place of the next stage; return before they are there.

        Args:
            residual: contiguous; must not be written to afterwards.
        """
        # At most one step a stage is under way, so the oldest of these has been asked for.
        if len(self._sends) == self._shard.pp_size:
            self._wait(self._sends.popleft(), self._stage(1))
        self.sent_bytes += residual.nbytes
        self._sends.append(self._pipeline.send([residual], self._shard.pp_stage + 1, 0))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Wait for what the stage before sends next; return it in `out`, contiguous."""
        work = self._pipeline.recv([out], self._shard.pp_stage - 1, 0)
        self._wait(work, self._stage(-1))
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
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [(peer, group.recv([parts[peer]], peer, 0)) for peer in peers]
        works += [(peer, group.send([partial], peer, 0)) for peer in peers]
        for peer, work in works:
            self._wait(work, self._neighbour(peer))
        return parts

    def _wait(self, work: Any, peer: Shard) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"{self._shard} lost {peer}: {_first_line(error)}") from error

    def _neighbour(self, tp_rank: int) -> Shard:
        return replace(self._shard, tp_rank=tp_rank)

    def _stage(self, step: int) -> Shard:
        return replace(self._shard, pp_stage=self._shard.pp_stage + step)


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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
