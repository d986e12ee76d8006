"""Play jobs through the real scheduler and KV cache manager without a model: counted, and exact.

Copies and forward passes take no time, and what is swapped in arrives with the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.workload import Job

from octavo.cache.kv_cache_manager import KVCacheManager
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.admission import SchedulerLimits
from octavo.scheduler.output import SampledToken, SchedulerOutput
from octavo.scheduler.policy import make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.sequence import Sequence

# Above every token of the prompts, so that no two sequences are alike by chance.
_FIRST_DRAWN_ID = 1_000_000


def make_scheduler(
    cache: KVCacheManager, limits: SchedulerLimits, *, swaps: bool = False, policy: str = "fcfs"
) -> Scheduler:
    """Return a scheduler that always swaps, or never does."""
    return Scheduler(limits, cache, make_policy(policy), (), lambda num_blocks, num_tokens: swaps)


def play(scheduler: Scheduler, jobs: list[Job]) -> Iterator[SchedulerOutput]:
    """Queue all jobs at once and run them; yield each step while its tokens would be computed.

    At that moment the step's blocks are allocated and its token counts have not advanced.
    """
    for number, job in enumerate(jobs):
        params = SamplingParams(
            temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True, seed=0
        )
        request = Request(str(number), tuple(job.prompt_token_ids), params)
        scheduler.add(Sequence(request))
    token_ids = itertools.count(_FIRST_DRAWN_ID)
    arrived: tuple[int, ...] = ()
    while scheduler.has_unfinished:
        scheduler.resume(arrived, 0.0)
        output = scheduler.schedule(0.0)
        yield output
        arrived = tuple(swap_in.transfer_id for swap_in in output.copies.swap_in)
        drawn = tuple(SampledToken(next(token_ids)) for _ in output.sampling)
        scheduler.advance(output)
        scheduler.expect(output.sampling)
        scheduler.update(output, drawn, 0.0)
    scheduler.check_integrity()
