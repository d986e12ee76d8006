"""The life of a rank other than zero: load, warm up, agree on the blocks, and do its part of steps.

Knows nothing of how its process is started or ended.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.executor.kv_storage import peak_bytes
from octavo.executor.parallel.adapter_reports import AdapterReporter
from octavo.executor.parallel.fingerprint import fingerprint
from octavo.executor.parallel.launcher import StepReader
from octavo.executor.parallel.part import Part
from octavo.executor.parallel.rank_messages import Assignment, Found, Loaded, RankFailed, Ready
from octavo.executor.parallel.rendezvous import count_ranks_here, join_rendezvous
from octavo.model.devices import use_device
from octavo.model.location import configured_checkpoint
from octavo.model.lora_list import adapter_directories
from octavo.model.process_groups import ProcessGroups

logger = logging.getLogger(__name__)


def run_rank(assignment: Assignment, host: str, connection: Connection, steps: StepReader) -> bool:
    """Be a rank until rank zero ends it; tell rank zero of a failure.

    Args:
        assignment: what it is.
        host: address of its machine as the other ranks reach it.
        connection: to rank zero.
        steps: where it hears of steps.

    Returns whether the end was in good order.
    """
    try:
        _serve(assignment, host, connection, steps)
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


def _serve(assignment: Assignment, host: str, connection: Connection, steps: StepReader) -> None:
    config = assignment.config
    torch.set_num_threads(assignment.num_threads)
    device = torch.device(assignment.device)
    use_device(device)
    directory = configured_checkpoint(config)
    connection.send(Found(fingerprint(directory, adapter_directories(config))))
    rendezvous = join_rendezvous(assignment, host)
    groups = ProcessGroups(assignment.shard, device, rendezvous)
    try:
        tell = AdapterReporter(rendezvous.store, assignment.rank).tell
        part = Part(config, assignment.shard, groups, device, tell)
        connection.send(Loaded())
        needed_bytes = peak_bytes(device, lambda: _do_steps(part, steps))
        num_ranks_here = count_ranks_here(rendezvous, config.num_ranks)
        connection.send(part.choose_blocks(needed_bytes, num_ranks_here))
        part.allocate(connection.recv())
        connection.send(Ready())
        _do_steps(part, steps)
    finally:
        groups.abort()  # what a GPU still waits for nobody sends any more


def _do_steps(part: Part, steps: StepReader) -> None:
    while message := steps.receive():
        part.serve(message)
