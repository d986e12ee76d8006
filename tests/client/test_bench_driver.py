import asyncio
import json
import threading
import time
from itertools import islice, repeat

import pytest

from octavo_client import AsyncClient
from octavo_client.bench.driver import PAUSE_AFTER_FAILURE_S, Driver, Plan
from octavo_client.bench.trace import Run
from octavo_client.bench.workload import Job

JOB = Job((5, 6, 7), 3, None, 11)


@pytest.fixture
def drive(server):
    """Return a function that drives jobs at the server as a plan says; it gives the run."""

    def run(jobs, plan=Plan(concurrency=1), on_end=lambda: None, **params) -> Run:  # noqa: B008
        async def main() -> Run:
            async with AsyncClient(server.url, timeout_s=10) as client:
                return await Driver(client, {"ignore_eos": True, **params}, on_end).run(
                    iter(jobs), plan
                )

        return asyncio.run(main())

    return run


def outcomes(run):
    return [trace.outcome for trace in run.traces]


def test_a_request_is_sent_as_its_job_says(server, drive):
    server.plays(server.last("abc", 1, 2, 3))
    drive([JOB], temperature=0.5)
    (sent,) = server.requests
    assert sent["input_ids"] == [5, 6, 7]
    assert sent["stream"] is True
    assert json.loads(sent["sampling_parameters"]) == {
        "max_tokens": 3,
        "seed": 11,
        "ignore_eos": True,
        "temperature": 0.5,
    }


def test_responses_are_written_down_as_they_come(server, drive):
    server.plays(server.delta("a", 1), server.delta(""), server.last("bc", 2, 3))
    (trace,) = drive([JOB]).traces
    assert [arrival.num_tokens for arrival in trace.arrivals] == [1, 2]
    times = [arrival.at_s for arrival in trace.arrivals]
    assert 0 <= trace.due_s <= trace.sent_s < times[0] <= times[1] == trace.end_s
    assert (trace.outcome, trace.num_input_tokens, trace.cached_tokens) == ("ok", 3, 0)


def test_a_failure_is_one_outcome_among_others_and_ends_nothing(server, drive):
    answers = iter(
        [
            [server.refuse("UNAVAILABLE: 8 requests wait already")],
            [server.delta("a", 1), server.fail("INTERNAL", "broken")],
            [server.refuse("INVALID_ARG: top_p is 7")],
            [server.last("", 1, finish_reason="abort")],
            [server.last("", 1, finish_reason="length")],
            [server.last("abc", 1, 2, 3)],
        ]
    )
    server.script = lambda _: next(answers)
    run = drive([JOB] * 6)
    assert outcomes(run) == ["UNAVAILABLE", "INTERNAL", "INVALID_ARG", "abort", "SHORT", "ok"]
    assert run.traces[0].error == "8 requests wait already"
    assert run.duration_s >= 5 * PAUSE_AFTER_FAILURE_S


def test_an_answer_that_may_end_early_is_not_short(server, drive):
    server.plays(server.last("a", 1))
    assert outcomes(drive([JOB], ignore_eos=False)) == ["ok"]


def test_a_job_is_cancelled_on_the_server_after_its_tokens(server, drive):
    server.plays(server.delta("a", 1), server.delta("b", 2), server.HANG)
    (trace,) = drive([Job((5,), 9, 2, 0)]).traces
    assert (trace.outcome, trace.num_output_tokens) == ("cancelled", 2)
    assert server.wait_cancelled()["input_ids"] == [5]


def test_an_answer_that_ends_before_it_is_cancelled_is_whole(server, drive):
    server.plays(server.last("abc", 1, 2, 3))
    assert outcomes(drive([Job((5,), 3, 2, 0)])) == ["ok"]


def test_clients_send_again_when_their_answer_has_come(server, drive):
    most, lock = [0, 0], threading.Lock()

    def answer(_):
        with lock:
            most[0] += 1
            most[1] = max(most)
        yield server.delta("a", 1)
        time.sleep(0.02)
        with lock:
            most[0] -= 1
        yield server.last("bc", 2, 3)

    server.script = answer
    run = drive([JOB] * 12, Plan(concurrency=3))
    assert outcomes(run) == ["ok"] * 12
    assert most[1] == 3


def test_jobs_are_sent_at_their_times_whatever_runs(server, drive):
    all_sent = threading.Barrier(3, timeout=10)
    server.script = lambda _: (all_sent.wait(), [server.last("abc", 1, 2, 3)])[1]
    arrivals = [0.05, 0.06, 0.10]
    run = drive(repeat(JOB), Plan(arrivals=arrivals))
    assert outcomes(run) == ["ok"] * 3
    assert sorted(trace.due_s for trace in run.traces) == arrivals
    assert all(trace.due_s <= trace.sent_s for trace in run.traces)


def test_nothing_is_sent_after_the_duration_but_what_runs_runs_on(server, drive):
    server.script = lambda _: (time.sleep(0.06), [server.last("abc", 1, 2, 3)])[1]
    run = drive(repeat(JOB), Plan(concurrency=2, duration_s=0.15))
    assert set(outcomes(run)) == {"ok"}
    assert all(trace.sent_s < 0.15 for trace in run.traces)
    times = (0.02 * place for place in range(1, 1000))
    run = drive(repeat(JOB), Plan(arrivals=times, duration_s=0.1))
    assert outcomes(run) == ["ok"] * 4


def test_an_interrupted_run_gives_what_there_is(server):
    answers = iter([[server.last("abc", 1, 2, 3)], [server.delta("a", 1), server.HANG]])
    server.script = lambda _: next(answers)

    async def main() -> Run:
        async with AsyncClient(server.url) as client:
            run = Driver(client, {"ignore_eos": True}).run(repeat(JOB), Plan(concurrency=1))
            task = asyncio.create_task(run)
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            return await task

    run = asyncio.run(main())
    assert run.was_interrupted
    assert outcomes(run) == ["ok", "interrupted"]
    server.wait_cancelled()


def test_each_end_is_told_and_the_generators_own_cost_is_measured(server, drive):
    ends: list[int] = []
    server.script = lambda _: (time.sleep(0.05), [server.last("abc", 1, 2, 3)])[1]
    run = drive(islice(repeat(JOB), 3), on_end=lambda: ends.append(1))
    assert len(ends) == 3
    assert run.cpu_s > 0
    assert run.lags_s
    assert min(run.lags_s) > -0.001
