"""Count how long the stages of a pipeline idle, by how many steps are in flight: simulated, exact.

    python -m benchmarks.pipeline

The real scheduler plans every step; a stage takes a fixed time for it and some for each token, and
begins when it is free and the stage before is done. Planning and sending take no time. Shares are
of the time from the first step to the last, filling and draining included.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import click
from benchmarks.dry_run import make_scheduler
from benchmarks.script_options import COUNT
from benchmarks.workload import Job, mixed_workload

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.engine import num_due
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import Sequence

NUM_STAGES = 4
BLOCK_SIZE = 16
#: Of one stage, about as the demo model's layers behave on a CPU: most of a small step is reading
#: weights.
STEP_S, TOKEN_S = 2e-3, 50e-6


@dataclass(frozen=True, slots=True)
class Run:
    """What became of some jobs."""

    idle_share: float
    """Of the time of all stages."""
    seconds: float
    num_steps: int
    """Of which something came."""


class Pipeline:
    """Stages that are busy one step at a time, and when each is free."""

    def __init__(self, num_stages: int, step_s: float, token_s: float) -> None:
        self.free_s = [0.0] * num_stages
        self.busy_s = 0.0
        self.num_steps = 0
        self._step_s, self._token_s = step_s, token_s

    def run(self, num_tokens: int, start_s: float) -> float:
        """Send a step through; return when the last stage is done with it."""
        each_s = self._step_s + num_tokens * self._token_s
        for stage, free_s in enumerate(self.free_s):
            start_s = self.free_s[stage] = max(start_s, free_s) + each_s
        self.busy_s += each_s * len(self.free_s)
        self.num_steps += 1
        return start_s


def play(jobs: list[Job], pipeline: Pipeline, limits: SchedulerLimits, num_blocks: int) -> Run:
    """Queue all jobs at once and run them, with `limits.num_stages` steps in flight."""
    scheduler = make_scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), limits)
    for number, job in enumerate(jobs):
        params = SamplingParams(
            temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True, seed=0
        )
        scheduler.add(Sequence(Request(str(number), tuple(job.prompt_token_ids), params)))
    started: deque[tuple[SchedulerOutput, float]] = deque()
    now_s = 0.0
    while scheduler.has_unfinished:
        output, end_s = scheduler.schedule(0.0), now_s
        if output.scheduled:
            end_s = pipeline.run(output.num_scheduled_tokens, now_s)
        scheduler.advance(output)
        started.append((output, end_s))
        compute = [bool(step.scheduled) for step, _ in started]
        for _ in range(num_due(compute, limits.num_stages)):
            landed, end_s = started.popleft()
            now_s = max(now_s, end_s)
            _land(scheduler, landed)
    scheduler.check_integrity()
    seconds = max(pipeline.free_s)
    idle_share = 1 - pipeline.busy_s / (seconds * len(pipeline.free_s))
    return Run(idle_share, seconds, pipeline.num_steps)


def _land(scheduler: Scheduler, output: SchedulerOutput) -> None:
    scheduler.expect(output.sampling)
    scheduler.update(output, (SampledToken(1),) * len(output.sampling), 0.0)


@click.command()
@click.option("--stages", default=NUM_STAGES, show_default=True, type=COUNT)
def main(stages: int) -> None:
    """Print idle shares of the mixed workload, and of long answers to short prompts."""
    workloads = {
        "mixed": mixed_workload(),
        "decode": [Job(list(range(1, 9)), 256) for _ in range(64)],
    }
    click.echo(f"{stages} stages of {STEP_S * 1e3:g} ms + {TOKEN_S * 1e6:g} us a token")
    for name, jobs in workloads.items():
        for in_flight in (1, 2, 4):
            limits = SchedulerLimits(64, 512, 4096, num_stages=in_flight)
            run = play(jobs, Pipeline(stages, STEP_S, TOKEN_S), limits, num_blocks=4096)
            click.echo(
                f"{name:8}{in_flight} in flight  idle {run.idle_share:6.1%}  "
                f"{run.num_steps:5} steps  {run.seconds:6.2f} s"
            )


if __name__ == "__main__":
    main()
