"""Sends the jobs of a workload to a server and writes down what came of each.

One event loop does it all: it costs less CPU a token than a thread for each request, and nothing
but the loop's own lag, which is measured beside, comes between an arrival and its time.
Knows nothing of figures or terminals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from octavo_client.answer import Delta
from octavo_client.async_client import AsyncClient
from octavo_client.bench.trace import CANCELLED, INTERRUPTED, OK, SHORT, Arrival, Run, Trace
from octavo_client.bench.workload import Job
from octavo_client.errors import OctavoClientError

#: A client whose request failed waits so long before its next: a server that is down is not
#: flooded.
PAUSE_AFTER_FAILURE_S = 0.1
_TICK_S = 0.02
_GOOD_ENDS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Plan:
    """When jobs are sent: by so many clients, each after its last one's end, or at set times."""

    concurrency: int | None = None
    arrivals: Iterable[float] = ()
    """Seconds from the start, rising; used where `concurrency` is None."""
    duration_s: float | None = None
    """No job is sent later than this; what runs then runs on. None means no limit."""


class Driver:
    """Drives jobs at one client's server; make one for each run.

    Args:
        params: sampling parameters that all requests share. With `ignore_eos` an answer that is
            shorter than its job asks counts as failed.
        on_end: called as each request ends.
    """

    def __init__(
        self,
        client: AsyncClient,
        params: dict[str, Any],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._params = params
        self._on_end = on_end
        self._traces: list[Trace] = []
        self._lags_s: list[float] = []
        self._started = perf_counter()

    async def run(self, jobs: Iterator[Job], plan: Plan) -> Run:
        """Send the jobs as planned and wait for their ends.

        When the task is cancelled, so are the running requests, and what there is is returned.
        """
        cpu_s, self._started = process_time(), perf_counter()
        ticker = asyncio.create_task(self._measure_lag())
        send = self._at_set_times if plan.concurrency is None else self._by_clients
        was_interrupted = False
        try:
            await send(jobs, plan)
        except asyncio.CancelledError:
            was_interrupted = True
        ticker.cancel()
        return Run(
            tuple(self._traces),
            max((trace.end_s for trace in self._traces), default=self._now()),
            process_time() - cpu_s,
            tuple(self._lags_s),
            was_interrupted,
        )

    async def _by_clients(self, jobs: Iterator[Job], plan: Plan) -> None:
        async def drive_one_client() -> None:
            for job in jobs:
                trace = await self._send(job, self._now())
                if trace.is_failure:
                    await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
                if plan.duration_s is not None and self._now() >= plan.duration_s:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.concurrency or 1):
                group.create_task(drive_one_client())

    async def _at_set_times(self, jobs: Iterator[Job], plan: Plan) -> None:
        async with asyncio.TaskGroup() as group:
            for job, due_s in zip(jobs, plan.arrivals, strict=False):
                if plan.duration_s is not None and due_s >= plan.duration_s:
                    return
                await asyncio.sleep(due_s - self._now())
                group.create_task(self._send(job, due_s))

    async def _send(self, job: Job, due_s: float) -> Trace:
        answer = _Answer(job, whole=bool(self._params.get("ignore_eos")))
        sent_s = self._now()
        try:
            stream = self._client.stream(
                input_ids=job.prompt,
                max_tokens=job.num_output_tokens,
                seed=job.seed,
                **self._params,
            )
            async with stream:
                async for delta in stream:
                    answer.add(delta, self._now())
                    if answer.is_past_its_cancel:
                        break
        except OctavoClientError as error:
            answer.fail(error)
        finally:
            trace = answer.trace(due_s, sent_s, self._now())
            self._traces.append(trace)
            self._on_end()
        return trace

    async def _measure_lag(self) -> None:
        while True:
            due = self._now() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lags_s.append(self._now() - due)

    def _now(self) -> float:
        return perf_counter() - self._started


class _Answer:
    """Deltas of one request as they come; until an end is known it counts as interrupted."""

    def __init__(self, job: Job, whole: bool) -> None:
        self.outcome = INTERRUPTED
        self._job = job
        self._whole = whole
        self._num_tokens = 0
        self._last_s = 0.0
        self._arrivals: list[Arrival] = []
        self._cached_tokens: int | None = None
        self._error = ""

    @property
    def is_past_its_cancel(self) -> bool:
        return self.outcome == CANCELLED

    def add(self, delta: Delta, now_s: float) -> None:
        self._last_s = now_s
        if delta.num_output_tokens:
            self._num_tokens += delta.num_output_tokens
            self._arrivals.append(Arrival(now_s, delta.num_output_tokens))
        if delta.timing is not None:
            self._cached_tokens = delta.timing.cached_tokens
        if delta.finish_reason is not None:
            self.outcome = self._end(delta.finish_reason)
        elif self._job.cancel_after is not None and self._num_tokens >= self._job.cancel_after:
            self.outcome = CANCELLED

    def fail(self, error: OctavoClientError) -> None:
        self.outcome, self._error = error.code, str(error)

    def trace(self, due_s: float, sent_s: float, end_s: float) -> Trace:
        return Trace(
            due_s,
            sent_s,
            self._last_s if self.outcome == OK else end_s,
            len(self._job.prompt),
            tuple(self._arrivals),
            self.outcome,
            self._cached_tokens,
            self._error,
        )

    def _end(self, finish_reason: str) -> str:
        if finish_reason not in _GOOD_ENDS:
            return finish_reason
        is_short = self._whole and self._num_tokens < self._job.num_output_tokens
        return SHORT if is_short else OK
