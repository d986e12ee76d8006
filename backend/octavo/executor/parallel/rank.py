"""The life of a rank other than zero: load, warm up, agree on the blocks, and do its part of steps.

Knows nothing of how its process is started or ended.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.executor.kv_storage import peak_bytes
from octavo.executor.parallel.control import ControlReader
from octavo.executor.parallel.fingerprint import fingerprint
from octavo.executor.parallel.part import Part
from octavo.executor.parallel.rank_messages import Assignment, Found, Loaded, RankFailed, Ready
from octavo.model.devices import use_device
from octavo.model.location import checkpoint_directory
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import Shard

HOST = "127.0.0.1"
"""Where the ranks of one machine reach each other."""

logger = logging.getLogger(__name__)


def run_rank(assignment: Assignment, connection: Connection, ring_fd: int) -> bool:
    """Be a rank until rank zero ends it; tell rank zero of a failure.

    Returns whether the end was in good order.
    """
    try:
        _serve(assignment, connection, ring_fd)
    except Exception as error:
        known = isinstance(error, OctavoError)
        # What rank zero tells of anyway is not to stand in the log twice.
        level = logging.DEBUG if known else logging.ERROR
        logger.log(level, "rank %d ends", assignment.rank, exc_info=error)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        failed = RankFailed(what, isinstance(error, ConfigError), isinstance(error, EngineError))
        with suppress(OSError):  # rank zero may be gone
            connection.send(failed)
        return False
    return True


def _serve(assignment: Assignment, connection: Connection, ring_fd: int) -> None:
    config = assignment.config
    torch.set_num_threads(assignment.num_threads)
    device = torch.device(assignment.device)
    use_device(device)
    shard = Shard.of(assignment.rank, config.tensor_parallel_size, config.pipeline_parallel_size)
    ring = ControlReader(ring_fd, config.num_ranks - 1, assignment.rank - 1)
    directory = checkpoint_directory(
        config.model,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    connection.send(Found(fingerprint(directory)))
    timeout_s = assignment.timeout_s
    store = TCPStore(
        HOST, assignment.store_port, config.num_ranks, timeout=timedelta(seconds=timeout_s)
    )
    groups = ProcessGroups(shard, device, Rendezvous(store, HOST, timeout_s))
    try:
        part = Part(config, shard, groups, device)
        connection.send(Loaded())
        needed_bytes = peak_bytes(device, lambda: _do_steps(part, ring))
        connection.send(part.choose_blocks(needed_bytes))
        part.allocate(connection.recv())
        connection.send(Ready())
        _do_steps(part, ring)
    finally:
        groups.abort()  # what a GPU still waits for nobody sends any more


def _do_steps(part: Part, ring: ControlReader) -> None:
    while message := ring.receive():
        part.serve(message)
