"""`RayRank`: the actor of a rank on a node of a Ray cluster.

Connects to rank zero, and is then what a rank is anywhere. Knows nothing of placement.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from dataclasses import replace

import ray

from octavo.executor.parallel.keyed_tcp import TcpStepReader, connect
from octavo.executor.parallel.rank_log import LogStream
from octavo.executor.parallel.ray_messages import Hello
from octavo.process_log import set_up_logging

_CONNECT_TIMEOUT_S = 20.0

logger = logging.getLogger(__name__)


class RayRank:
    """A rank of a model in a worker process of Ray's, or what holds a GPU for rank zero."""

    def gpu(self) -> str:
        """Return what Ray calls the only GPU that is this actor's."""
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return str(gpu)

    def serve(self, rank: int, host: str, address: tuple[str, int], key: bytes) -> None:
        """Be a rank until rank zero ends it.

        Args:
            rank: which.
            host: address of this node as other nodes reach it.
            address: where rank zero listens.
            key: what rank zero knows it by.
        """
        _end_with_parent()
        log = connect(address, key, _CONNECT_TIMEOUT_S)
        log.send(Hello(rank, is_log=True))
        connection = connect(address, key, _CONNECT_TIMEOUT_S)
        connection.send(Hello(rank, is_log=False))
        os.environ.update(connection.recv())
        set_up_logging("json", f"rank {rank} on {host}", LogStream(log))
        assignment = connection.recv()
        # Imported late: what they import reads the environment.
        from octavo.executor.parallel.rank import run_rank
        from octavo.model.devices import device_of_gpu

        if assignment.device == "cuda":
            device = device_of_gpu(gpu := self.gpu(), os.environ)
            logger.info("computes on GPU %s of this node, here %s", gpu, device)
            assignment = replace(assignment, device=str(device))
        run_rank(assignment, host, connection, TcpStepReader(connection))
        logging.shutdown()
        connection.close()


def _end_with_parent() -> None:
    """Make this process end with the raylet that started it; Ray takes seconds for that."""
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([parent], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="raylet-watch", daemon=True).start()
