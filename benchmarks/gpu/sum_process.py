"""One rank of a tensor group that times its sums and prints them, for `rank_sums`.

All ranks make the same ones, as often as each other; one call follows another, so that the time of
one is its share of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.model.devices import use_device
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import Shard

HOST = "127.0.0.1"
_WARM_UPS, _REPEATS = 5, 20
_TIMEOUT_S = 60.0


def main() -> int:
    """Time sums of rows of states, and print seconds by rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m gpu.sum_process")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", options.rank) if is_gpu else torch.device("cpu")
    use_device(device)
    if not is_gpu:
        torch.set_num_threads(1)
    store = TCPStore(HOST, options.port, timeout=timedelta(seconds=_TIMEOUT_S))
    shard = Shard.of(options.rank, options.size, 1)
    groups = ProcessGroups(shard, device, Rendezvous(store, HOST, _TIMEOUT_S))
    times_s = {rows: _time_sum(groups, rows, options.hidden, device) for rows in options.rows}
    print(json.dumps({str(rows): seconds for rows, seconds in times_s.items()}))
    groups.abort()
    return 0


def _time_sum(groups: ProcessGroups, rows: int, hidden: int, device: torch.device) -> float:
    partial = torch.ones(rows, hidden, dtype=torch.bfloat16, device=device)
    for _ in range(_WARM_UPS):
        groups.sum_(partial)
    _wait(device)
    started_s = time.perf_counter()
    for _ in range(_REPEATS):
        groups.sum_(partial)
    _wait(device)
    return (time.perf_counter() - started_s) / _REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
