"""One revision's engine, for `gate.py`: plays the workload each time that it is told to.

Prints one JSON line when the model is loaded and one for each line that it reads. Runs with the
packages of any revision that PYTHONPATH names, so it uses only what every revision has.
"""

from __future__ import annotations

import json
import sys
import time
import zlib

from workload import mixed_workload

from octavo import LLM, SamplingParams

NUM_REQUESTS = 24


def main() -> None:
    jobs = mixed_workload(seed=1, num_requests=NUM_REQUESTS)
    prompts = [job.prompt_token_ids for job in jobs]
    params = [
        SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True, seed=0)
        for job in jobs
    ]
    llm = LLM("demo", kv_cache_memory_bytes=2**29, enable_prefix_caching=False, cpu_threads=1)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started, started_cpu = time.monotonic(), time.process_time()
        answers = llm.generate(prompts, params)
        figures = {
            "wall_s": time.monotonic() - started,
            "cpu_s": time.process_time() - started_cpu,
            "tokens": zlib.crc32(repr([answer.token_ids for answer in answers]).encode()),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
