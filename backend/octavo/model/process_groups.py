"""`ProcessGroups`: the ranks of a tensor group and the stages of a pipeline over torch.distributed.

The groups are this object's own, not torch's global one, so that several engines of one process are
apart. gloo moves the bytes of a CPU, or a memory that the ranks of a tensor group share on one
machine; that is done when a call returns. NCCL moves those of CUDA devices: a call queues its work,
the device's current stream waits for what comes in, and the host for nothing; so a rank that is
gone shows by work that never ends, which whoever waits for the device must notice. Each pair of
neighbouring stages has a group of its own, as NCCL would else let what a stage sends wait for what
it receives. Knows nothing of models or steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    PrefixStore,
    Store,
)

from octavo.errors import EngineError
from octavo.model.shard import Shard
from octavo.model.shared_memory import share_memory
from octavo_kernels import SharedExchange, sum_in_order_reference

#: Times the limit after which torch ends a process whose work on a GPU does not: whoever knows the
#: ranks shall come first, and say which of them it is.
_NCCL_PATIENCE = 2


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
        self._sent_bytes = 0
        self._shard = shard
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        self._peers = {rank: replace(shard, tp_rank=rank) for rank in ranks}
        self._gathers_at_once = device.type == "cuda"
        self._sends: deque[Any] = deque()
        place, stage = shard.tp_rank, shard.pp_stage
        self._tensor_group = self._before = self._after = None
        try:
            self.exchange = self._share_memory(f"memory-{stage}", device, rendezvous)
            if shard.tp_size > 1 and self.exchange is None:
                self._tensor_group = _open(
                    f"tensor-{stage}", place, shard.tp_size, device, rendezvous
                )
            if not shard.is_first_stage:
                self._before = _open(f"stages-{stage - 1}-{place}", 1, 2, device, rendezvous)
            if not shard.is_last_stage:
                self._after = _open(f"stages-{stage}-{place}", 0, 2, device, rendezvous)
        except RuntimeError as error:
            self.abort()
            raise EngineError(
                f"{shard} did not reach the other ranks of its tensor group and its pipeline "
                f"within {rendezvous.timeout_s:g} s: {_reason(error)}"
            ) from error

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others since the start."""
        if self.exchange is None:
            return self._sent_bytes
        return self._sent_bytes + (self.size - 1) * self.exchange.sent_bytes

    def sum_(self, partial: torch.Tensor) -> None:
        """Replace partial sums by their sum; see Collectives."""
        if self.size == 1:
            return
        if self.exchange is not None:
            self.exchange.sum_(partial)
            return
        partial.copy_(sum_in_order_reference(self._exchange(partial)))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of all ranks on rank 0; see Collectives."""
        self._sent_bytes += part.nbytes if self.rank else 0
        if self.exchange is not None:
            return self.exchange.gather(part)
        group: Any = self._tensor_group
        if self.rank:
            with self._losing(self._peers[0]):
                group.send([part], 0, 0).wait()
            return []
        parts = [part, *(torch.empty_like(part) for _ in self._peers)]
        for rank, peer in self._peers.items():
            with self._losing(peer):
                group.recv([parts[rank]], rank, 0).wait()
        return parts

    def abort(self) -> None:
        """End the groups, and on a GPU all that is under way in them; nothing can be sent after."""
        self._sends.clear()
        for group in (self._tensor_group, self._before, self._after):
            if group is not None:
                group.abort()

    def send(self, residual: torch.Tensor) -> None:
        """Send a step's states to the same place of the next stage; return before they are there.

        Args:
            residual: contiguous; must not be written to afterwards.
        """
        self._sent_bytes += residual.nbytes
        stage = self._shard.pp_stage + 1
        with self._losing(replace(self._shard, pp_stage=stage)):
            # No more steps than stages are under way, so the oldest of these has been asked for.
            if len(self._sends) == self._shard.pp_size:
                self._sends.popleft().wait()
            group: Any = self._after
            self._sends.append(group.send([residual], 1, 0))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Wait for what the stage before sends next; return it in `out`, contiguous."""
        stage = self._shard.pp_stage - 1
        with self._losing(replace(self._shard, pp_stage=stage)):
            group: Any = self._before
            group.recv([out], 0, 0).wait()
        return out

    def _share_memory(
        self, name: str, device: torch.device, rendezvous: Rendezvous
    ) -> SharedExchange | None:
        """Return the memory of the tensor group, where it can have one."""
        if self.size == 1 or device.type != "cpu":
            return None
        shard, peers = self._shard, self._peers

        def lost(rank: int, reason: str) -> EngineError:
            return EngineError(f"{shard} lost {peers[rank]}: {reason}")

        store = PrefixStore(name, rendezvous.store)
        place = (self.rank, self.size, rendezvous.host)
        return share_memory(store, *place, rendezvous.timeout_s, lost)

    def _exchange(self, partial: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in order."""
        self._sent_bytes += (self.size - 1) * partial.nbytes
        together = partial.new_empty((self.size, *partial.shape))
        parts: list[torch.Tensor] = list(together)
        group: Any = self._tensor_group
        if self._gathers_at_once:
            options = AllgatherOptions()
            # On the current stream itself, which would else wait for another one and back.
            options.asyncOp = False
            group._allgather_base(together.flatten(0, 1), partial, options).wait()
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
    """Return the process group of a name, connected."""
    store = PrefixStore(name, rendezvous.store)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if device.type == "cuda":
        return _open_nccl(store, rank, size, device, timeout)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _open_nccl(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    # NCCL waits for the others for ever: they must be there before it is asked to.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(size)], timeout)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = _NCCL_PATIENCE * timeout
    group = dist.ProcessGroupNCCL(store, rank, size, nccl)
    # Now rather than in the first step, and one connection for all that the group does.
    group.eager_connect_single_device(device)
    return group


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, without the place in the source it came from."""
    return re.sub(r"^\[\S*\] *", "", str(error).strip()).split(". ")[0].splitlines()[0]
