"""Where ranks find each other: a store that rank zero keeps, at an address that all can reach.

Knows nothing of models or of what ranks say to each other later.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from octavo.executor.parallel.rank_messages import Assignment
from octavo.model.process_groups import Rendezvous


def open_rendezvous(host: str, timeout_s: float) -> tuple[Rendezvous, int]:
    """Return rank zero's end, and the port at which `host` tells the other ranks of each other."""
    # On a port that the system chooses, so that none is taken; at no other address than `host`.
    with socket.create_server((host, 0)) as listening:
        port, fd = listening.getsockname()[1], listening.detach()
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd
    )
    _say_host(store, 0, host)
    return Rendezvous(store, host, timeout_s), port


def join_rendezvous(assignment: Assignment, host: str) -> Rendezvous:
    """Return another rank's end.

    Args:
        assignment: its own.
        host: address of its machine as the others reach it.
    """
    timeout = timedelta(seconds=assignment.timeout_s)
    store = TCPStore(
        assignment.store_host,
        assignment.store_port,
        assignment.config.num_ranks,
        timeout=timeout,
    )
    _say_host(store, assignment.rank, host)
    return Rendezvous(store, host, assignment.timeout_s)


def count_ranks_here(rendezvous: Rendezvous, num_ranks: int) -> int:
    """Return how many ranks share this rank's machine, itself among them.

    Waits for ranks that have not come yet.
    """
    names = [_host_key(rank) for rank in range(num_ranks)]
    hosts = [rendezvous.store.get(name).decode() for name in names]
    return hosts.count(rendezvous.host)


def _say_host(store: Store, rank: int, host: str) -> None:
    store.set(_host_key(rank), host)


def _host_key(rank: int) -> str:
    return f"host-{rank}"
