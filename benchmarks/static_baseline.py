"""transformers' own generate in static batches, as a worker process.

Reads jobs as JSON from standard input, prints one JSON line when the model is loaded and one with
the seconds when all is done. A batch runs until its longest output ends: that is the traditional
mode's cost.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging


def main() -> None:
    request = json.loads(sys.stdin.readline())
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    _generate(model, request["jobs"][:1])
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    started_s = time.monotonic()
    size = request["batch_size"]
    for begin in range(0, len(request["jobs"]), size):
        _generate(model, request["jobs"][begin : begin + size])
    print(json.dumps({"wall_s": time.monotonic() - started_s}), flush=True)


def _generate(model, jobs: list[list]) -> None:
    """Run one batch of [prompt ids, output length] pairs, padded on the left."""
    width = max(len(prompt) for prompt, _ in jobs)
    longest = max(count for _, count in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(jobs):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest)


if __name__ == "__main__":
    main()
