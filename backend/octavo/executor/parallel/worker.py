"""A rank in a process of its own: `python -m octavo.executor.parallel.worker --fd N --ring M`.

Loads its part of the model, then does its part of every step that the control ring tells of, until
an empty message. Never outlives the thread that started it. Knows nothing of sequences or requests.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from multiprocessing.connection import Connection

from octavo.executor.parallel.control import ControlReader
from octavo.parent_process import die_with_parent
from octavo.process_log import set_up_logging

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve the rank whose assignment comes by `--fd`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank zero alone decides when to end
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m octavo.executor.parallel.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to rank zero")
    parser.add_argument("--ring", type=int, required=True, help="inherited memory of the steps")
    arguments = parser.parse_args()
    connection: Connection = Connection(arguments.fd)
    try:
        assignment = connection.recv()
    except (EOFError, OSError):
        return 1  # rank zero died before this process was tied to it
    set_up_logging(assignment.config.log_format, f"rank {assignment.rank}")
    # Imported late: torch takes seconds, and by then this process must be tied to its parent.
    from octavo.executor.parallel.rank import run_rank

    steps = ControlReader(arguments.ring, assignment.config.num_ranks - 1, assignment.rank - 1)
    return 0 if run_rank(assignment, assignment.store_host, connection, steps) else 1


if __name__ == "__main__":
    sys.exit(main())
