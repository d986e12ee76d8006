"""Octavo's own traditional mode in a process of its own, without a server: the static baseline.

Takes each request as it arrives; the engine makes batches of what waits. Every answer has its full
length, and its tokens are there as the engine tells them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.static_engine.engine import StaticEngine

# As a script it has only its own folder to import from.
sys.path.append(str(Path(__file__).with_name("peers")))
from worker_loop import RequestQueue, serve


def load_engine(options: dict[str, Any]) -> Callable[[RequestQueue], None]:
    """Load the checkpoint into the engine."""
    config = EngineConfig(
        options["model"],
        model_impl="static",
        dtype="bfloat16",
        device="cpu",
        cpu_threads=options["threads"],
        max_num_seqs=options["batch_size"],
    )
    return partial(play, StaticEngine.load(config))


def play(engine: StaticEngine, queue: RequestQueue) -> None:
    """Run step after step until all requests are answered."""
    num_live = 0
    while queue.has_more or num_live:
        for place in queue.take(num_live):
            engine.add(_make_request(place, *queue.jobs[place]))
            num_live += 1
        if not engine.has_unfinished:
            time.sleep(queue.wait_s(num_live))
            continue
        for output in engine.step().outputs:
            queue.came(int(output.request_id), len(output.token_ids))
            num_live -= output.finish_reason is not None


def _make_request(place: int, prompt: list[int], num_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    return Request(str(place), tuple(prompt), params, time.monotonic())


if __name__ == "__main__":
    serve(load_engine)
