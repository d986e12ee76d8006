"""OpenVINO GenAI's continuous batching pipeline in a process of its own, without a server.

Runs in the peer's own environment.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker_loop import RequestQueue, serve


def load_model(options: dict[str, Any]) -> Callable[[RequestQueue], None]:
    """Load the converted model."""
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in options["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"], scheduler, "CPU", options["properties"]
    )
    return partial(play, pipeline, itertools.count())


def play(
    pipeline: openvino_genai.ContinuousBatchingPipeline,
    names: itertools.count[int],
    queue: RequestQueue,
) -> None:
    """Step the pipeline until every request has ended."""
    running: dict[int, Any] = {}
    while queue.has_more or running:
        for request in queue.take(len(running)):
            prompt, num_output_tokens = queue.jobs[request]
            running[request] = pipeline.add_request(
                next(names),
                openvino.Tensor(np.array([prompt], np.int64)),
                greedy(num_output_tokens),
            )
        if not running:
            time.sleep(queue.wait_s(0))
            continue
        pipeline.step()
        for request, handle in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    queue.came(request, len(output.generated_ids))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[request]


def greedy(num_output_tokens: int) -> openvino_genai.GenerationConfig:
    """Return a configuration that gives exactly so many tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_output_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(load_model)
