"""transformers' own generation in a process of its own: static batches, or continuous batching.

Runs in the peer's own environment. A static batch takes the requests that have arrived, at most
`batch_size`, and runs until its longest output ends: that is the traditional mode's cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging
from worker_loop import RequestQueue, serve


def load_model(options: dict[str, Any]) -> Callable[[RequestQueue], None]:
    """Load the checkpoint for the mode that `options` names."""
    logging.set_verbosity_error()
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    # Without an end-of-sequence token every answer has its full length.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    if "batch_size" in options:
        return partial(play_static, model, options["batch_size"])
    manager = model.init_continuous_batching(
        model.generation_config, ContinuousBatchingConfig(**options["continuous"])
    )
    manager.start()
    return partial(play_continuous, manager)


def play_static(model: PreTrainedModel, batch_size: int, queue: RequestQueue) -> None:
    """Run batch after batch."""
    while queue.has_more:
        batch = queue.take(0, most=batch_size)
        if batch:
            run_batch(model, batch, queue)
        else:
            time.sleep(queue.wait_s(0))


def run_batch(model: PreTrainedModel, batch: list[int], queue: RequestQueue) -> None:
    """Generate for one batch, padded on the left, and note when each step ended."""
    jobs = [queue.jobs[request] for request in batch]
    width = max(len(prompt) for prompt, _ in jobs)
    longest = max(count for _, count in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(jobs):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def note(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for request, (_prompt, count) in zip(batch, jobs, strict=True):
            if input_ids.shape[1] - width <= count:
                queue.came(request, 1)
        return torch.zeros(len(jobs), dtype=torch.bool)

    model.generate(ids, attention_mask=mask, max_new_tokens=longest, stopping_criteria=[note])


def play_continuous(manager: Any, queue: RequestQueue) -> None:
    """Hand requests to the manager's own thread and collect the times it notes."""
    running: dict[str, int] = {}
    while queue.has_more or running:
        for request in queue.take(len(running)):
            prompt, count = queue.jobs[request]
            name = manager.add_request(
                prompt, max_new_tokens=count, record_timestamps=True, eos_token_id=-1
            )
            running[name] = request
        result = manager.get_result(timeout=queue.wait_s(len(running)))
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the manager has stopped")
            continue
        if result.error:
            raise RuntimeError(result.error)
        times_s = [queue.since_start(moment_s) for moment_s in result.timestamps]
        queue.replies[running.pop(result.request_id)][1].extend(times_s)


if __name__ == "__main__":
    serve(load_model)
