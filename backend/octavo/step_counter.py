"""Counts what an engine does, step by step, for those who watch it.

Knows nothing of the model, of tokens' ids or of who watches.
"""

from __future__ import annotations

from octavo.grammar_gate import GrammarGate
from octavo.request import StepStats
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler

_NOTHING = SchedulerOutput(())


class StepCounter:
    """Totals since the engine started, and its queues and blocks as they are when it is asked."""

    def __init__(self, scheduler: Scheduler, gate: GrammarGate) -> None:
        self._scheduler = scheduler
        self._gate = gate
        self._last = StepStats()

    def count(
        self,
        scheduled: SchedulerOutput = _NOTHING,
        num_generated_tokens: int = 0,
        step_s: float = 0.0,
    ) -> StepStats:
        """Add one step to the totals and return all figures; by default no step, as at idle."""
        last, scheduler, cache = self._last, self._scheduler, self._scheduler.cache
        num_scheduled = scheduled.num_scheduled_tokens
        num_refused = scheduler.admission.num_requests_refused + self._gate.num_requests_refused
        restoring_ids = {each.request_id for each in scheduler.restoring.values()}
        self._last = StepStats(
            step=last.step + bool(scheduled.scheduled),
            num_running=len({each.request_id for each in scheduler.running}),
            num_waiting=scheduler.waiting.num_requests + len(self._gate),
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            num_scheduled_tokens=num_scheduled,
            num_context=scheduled.num_prefills,
            step_s=step_s,
            num_computed_tokens_total=last.num_computed_tokens_total + num_scheduled,
            num_generated_tokens_total=last.num_generated_tokens_total + num_generated_tokens,
            num_preemptions_total=scheduler.num_preemptions,
            num_swapped=len(scheduler.waiting.swapped_request_ids | restoring_ids),
            num_cached_blocks=cache.num_cached_blocks,
            num_host_blocks=cache.num_host_blocks,
            num_used_host_blocks=cache.num_used_host_blocks,
            num_cached_host_blocks=cache.host_pool.num_cached,
            num_swap_preemptions_total=scheduler.num_swap_preemptions,
            num_prefix_query_tokens_total=cache.num_query_tokens,
            num_prefix_hit_tokens_total=cache.num_hit_tokens,
            num_requests_refused_total=num_refused,
            num_tokens_refused_total=scheduler.admission.num_tokens_refused,
            num_resident_adapters=scheduler.adapters.num_resident,
            num_adapter_loads_total=scheduler.adapters.num_loads,
            num_failed_adapter_loads_total=scheduler.adapters.num_failed_loads,
            adapter_wait_s_total=scheduler.adapters.held_s,
        )
        return self._last
