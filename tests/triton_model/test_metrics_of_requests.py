"""How requests count in the metrics and to every reporter: each once, by how it ended."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from octavo.request import FinishReason
from octavo.triton_model.request_record import RequestRecord
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

REJECTIONS = "octavo_admission_rejections_total"


def test_every_request_counts_once_by_how_it_ended(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(max_num_queued_requests=1)

    def ends() -> dict[str, float]:
        return {
            reason.value: pb_utils.MetricFamily.value(f"octavo_requests_total {reason.value}")
            for reason in FinishReason
        }

    ask(serving, "ab", max_tokens=2, n=2).wait_final()
    ask(serving, "ab", seed=fake_engine.REFUSED).wait_final()
    ask(serving, "ab", max_tokens=150, deadline_ms=30).wait_final()
    ask(serving, "ab", max_tokens=150, stop="bab").wait_final()
    gone = ask(serving, "ab", max_tokens=150)
    gone.cancelled = True
    gone.wait_final()
    expected = {"stop": 1, "length": 1, "abort": 1, "deadline": 1, "error": 1}
    eventually(lambda: ends() == expected)


def test_who_is_turned_away_is_counted_by_reason_and_as_an_end(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(process=True)
    ask(serving, "a" * 100_000).wait_final()
    for mistake in ({"temperature": -1}, {"seed": fake_engine.REFUSED}):
        ask(serving, "ab", **mistake).wait_final()
    running = ask(serving, "ab", max_tokens=10**6)
    ask(serving, "ab", max_tokens=9, seed=fake_engine.DIES)
    running.wait_final()
    ask(serving, "ab").wait_final()
    serving.close()
    ask(serving, "ab").wait_final()
    figures = pb_utils.MetricFamily.latest()
    rejections = {name: count for name, count in figures.items() if name.startswith(REJECTIONS)}
    assert rejections == {
        f"{REJECTIONS} prompt_too_long": 1,
        f"{REJECTIONS} invalid_request": 2,
        f"{REJECTIONS} engine_down": 1,
    }
    assert figures["octavo_requests_total error"] == 6


def test_lengths_and_times_are_of_requests_that_did_not_end_in_an_error(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType, pb_utils: Any
) -> None:
    serving = make_service()
    ask(serving, "abc", max_tokens=5, n=2).wait_final()
    ask(serving, "abcd", max_tokens=150, stop="cd").wait_final()
    gone = ask(serving, "ab", stream=True, max_tokens=10**6)
    gone.wait_for(lambda sender: len(sender.responses) > 0)
    gone.cancelled = True
    gone.wait_final()
    ask(serving, "ab", temperature=-1).wait_final()
    serving.close()
    assert pb_utils.MetricFamily.samples("octavo_request_prompt_tokens") == [3, 4]
    assert pb_utils.MetricFamily.samples("octavo_request_generation_tokens") == [10, 4]
    assert (
        pb_utils.MetricFamily.samples("octavo_request_queue_time_seconds")
        == [fake_engine.QUEUE_S] * 2
    )
    first, whole = (
        pb_utils.MetricFamily.samples(f"octavo_{name}_seconds")
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert (len(first), len(whole)) == (3, 2)
    assert 0 < first[0] < whole[0]
    figures = pb_utils.MetricFamily.latest()
    assert figures["octavo_prompt_tokens_total"] == 9
    num_intervals = len(pb_utils.MetricFamily.samples("octavo_inter_token_latency_seconds"))
    assert figures["octavo_generation_tokens_total"] - num_intervals == 4  # as many as answers


def test_every_reporter_is_told_once_of_every_request_even_if_another_fails(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise RuntimeError("disk full")

    serving = make_service(reporters=(fail, told.append))
    ask(serving, "ab", max_tokens=3).wait_final()
    ask(serving, "abcd", max_tokens=150, stop="bc").wait_final()
    ask(serving, "ab", temperature=-1).wait_final()
    gone = ask(serving, "ab", max_tokens=10**6)
    gone.cancelled = True
    gone.wait_final()
    serving.close()
    ends = [(r.finish_reason.value, r.num_prompt_tokens, r.was_refused) for r in told]
    assert sorted(ends) == sorted(
        [("length", 2, False), ("stop", 4, False), ("error", 0, True), ("abort", 2, False)]
    )
    stopped = next(record for record in told if record.finish_reason is FinishReason.STOP)
    assert stopped.num_generated_tokens == 3
    assert stopped.timing is not None
    assert stopped.timing.queue_s == fake_engine.QUEUE_S
    assert stopped.first_token_s is not None
    assert stopped.arrival_s < stopped.first_token_s < stopped.end_s
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("a finished request could not be reported") == 4


def test_a_request_whose_answer_cannot_be_sent_counts_once(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service()
    sender = ask(serving, "ab", max_tokens=20)
    sender.broken = True
    sender.wait_final()
    names = [f"octavo_requests_total {reason.value}" for reason in FinishReason]
    eventually(lambda: sum(pb_utils.MetricFamily.value(name) for name in names) == 1)
