"""The memory of a tensor group whose ranks are processes, or threads, of one machine.

It has no name: the first rank makes it, the others open its descriptor. Each rank also holds an end
of a pipe, by whose closing the others see that it is gone. Knows nothing of what is exchanged.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from octavo_kernels import SharedExchange, exchanges_in_memory

OnLoss = Callable[[int, str], Exception]
"""Makes the error of a rank that is lost, from its number and a reason."""


def share_memory(
    store: Store, rank: int, size: int, host: str, timeout_s: float, on_loss: OnLoss
) -> SharedExchange | None:
    """Return a rank's end of a memory that its group shares, or None, then to all of them.

    All ranks of the group call it, and wait for each other. There is none where ranks are on
    different machines, may not open each other's descriptors, or have no native code.

    Args:
        store: of the group alone.
        rank: place in the group.
        size: ranks in the group.
        host: address of this rank's machine as the others reach it; those of another are elsewhere.
        timeout_s: how long to wait for another rank, here and in every exchange.
        on_loss: makes the error that an exchange raises.

    Raises:
        RuntimeError: a rank does not come.
    """
    timeout = timedelta(seconds=timeout_s)
    alive, mine = Pipe(duplex=False)
    fd = os.memfd_create("octavo-exchange") if rank == 0 else None
    try:
        if fd is not None:
            os.ftruncate(fd, SharedExchange.num_bytes(size))
        _tell(store, "open", rank, _address(host, alive.fileno(), fd))
        addresses = _hear(store, "open", range(size), timeout)
        memory, others = _open(addresses, rank, size)
        _tell(store, "is open", rank, "" if memory is None else "yes")
        are_open = _hear(store, "is open", range(size), timeout)
    finally:
        alive.close()
        if fd is not None:
            os.close(fd)
    if memory is None or not all(are_open):
        return None

    def watch(peer: int, waited_s: float, _mine: Connection = mine) -> None:
        if wait([others[peer]], 0.0):
            raise on_loss(peer, "it is gone")
        if waited_s > timeout_s:
            raise on_loss(peer, f"it has not come within {timeout_s:g} s")

    return SharedExchange(memory, rank, size, watch)


def _address(host: str, alive_fd: int, memory_fd: int | None) -> str:
    """Return where this process's descriptors are found on this machine, or nothing."""
    if not exchanges_in_memory():
        return ""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{host} {machine} {processes} {os.getpid()} {alive_fd} {memory_fd}"


def _open(
    addresses: list[str], rank: int, size: int
) -> tuple[mmap.mmap | None, dict[int, Connection]]:
    """Return the memory, and the pipe of each other rank; no memory where not all can be opened."""
    others: dict[int, Connection] = {}
    with suppress(OSError, ValueError):
        if len({tuple(address.split()[:3]) for address in addresses}) > 1:
            return None, others
        for other, address in enumerate(addresses):
            _, _, _, pid, alive_fd, memory_fd = address.split()
            if other != rank:
                pipe = _open_of(pid, alive_fd, os.O_RDONLY | os.O_NONBLOCK)
                others[other] = Connection(pipe, writable=False)
            if other == 0:
                fd = _open_of(pid, memory_fd, os.O_RDWR)
                try:
                    memory = mmap.mmap(fd, SharedExchange.num_bytes(size))
                finally:
                    os.close(fd)
        return memory, others
    return None, others


def _open_of(pid: str, fd: str, flags: int) -> int:
    # As numbers: whoever can reach the store shall not have other files opened.
    return os.open(f"/proc/{int(pid)}/fd/{int(fd)}", flags | os.O_CLOEXEC)


def _tell(store: Store, what: str, rank: int, value: str) -> None:
    store.set(f"{what} {rank}", value)


def _hear(store: Store, what: str, ranks: Iterable[int], timeout: timedelta) -> list[str]:
    keys = [f"{what} {rank}" for rank in ranks]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]
