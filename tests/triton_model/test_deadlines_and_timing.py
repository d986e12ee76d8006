"""Requests that run out of time, queues that are full, and what a request says of its time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]


def test_a_deadline_while_running_ends_a_stream_with_what_it_has(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    sender = ask(
        make_service(),
        "ab",
        stream=True,
        max_tokens=10**6,
        deadline_ms=100,
        return_finish_reason=True,
    ).wait_final()
    assert len(sender.text) > 2
    assert sender.text == ("ab" * len(sender.text))[: len(sender.text)]
    assert sender.responses[-1].output("finish_reason") == "deadline"
    eventually(lambda: pb_utils.MetricFamily.series["octavo_kv_blocks_used"].values[-1] == 0)


def test_a_deadline_while_running_ends_a_whole_answer_with_what_it_has(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(
        make_service(),
        "ab",
        max_tokens=10**6,
        stop="bX",
        deadline_ms=100,
        return_finish_reason=True,
        return_num_output_tokens=True,
    ).wait_final()
    (response,) = sender.responses
    assert response.output("finish_reason") == "deadline"
    assert len(response.output("text_output")) == 2 + response.output("num_output_tokens")


def test_a_deadline_while_waiting_is_an_error_that_says_how_long_it_had(
    make_service: MakeService, ask: Ask
) -> None:
    serving = make_service()
    running = [ask(serving, "ab", stream=True, max_tokens=200) for _ in range(2)]
    started = time.monotonic()
    sender = ask(serving, "ab", deadline_ms="60", n=2).wait_final()
    assert 0.06 <= time.monotonic() - started < 0.3
    assert sender.error.code == "CANCELLED"
    assert sender.error.reason == (
        "the request passed its deadline of 60 ms before its first token; "
        "send it again when fewer requests wait, or give it more time"
    )
    assert [other.wait_final().text for other in running] == ["ab" * 100] * 2


def test_a_deadline_ends_all_answers_with_what_each_has(
    make_service: MakeService, ask: Ask
) -> None:
    """The engine runs two at a time, so the third has nothing yet."""
    sender = ask(
        make_service(),
        "ab",
        n=3,
        max_tokens=10**6,
        deadline_ms=80,
        exclude_input_in_output=True,
        return_finish_reason=True,
    ).wait_final()
    (response,) = sender.responses
    assert response.output("finish_reason") == ["deadline"] * 3
    first, second, third = response.output("text_output")
    assert first.startswith("ab")
    assert second.startswith("ba")
    assert third == ""


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        ({"timeout_us": 60_000}, 0.06),
        ({"timeout_us": 60_000_000, "parameters": {"timeout": 60_000}}, 0.06),
        ({"timeout_us": 60_000_000, "parameters": {"deadline_ms": 60}}, 0.06),
    ],
)
def test_the_protocols_timeout_ends_a_request(
    make_service: MakeService,
    make_request: Callable[..., Any],
    options: dict[str, Any],
    limit_s: float,
) -> None:
    request = make_request(
        text_input="ab",
        sampling_parameters='{"max_tokens": 1000000}',
        return_finish_reason=True,
        **options,
    )
    started = time.monotonic()
    make_service().accept(request)
    request.sender.wait_final()
    assert limit_s <= time.monotonic() - started < limit_s + 0.3
    assert request.sender.responses[-1].output("finish_reason") == "deadline"


def test_a_full_queue_answers_at_once_and_others_run_on(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service(max_num_queued_requests=1)
    others = [ask(serving, "ab", stream=True, max_tokens=100) for _ in range(3)]
    started = time.monotonic()
    error = ask(serving, "ab").wait_final().error
    assert time.monotonic() - started < 0.1
    assert (error.code, error.reason) == ("UNAVAILABLE", "too much waits")
    assert [other.wait_final().text for other in others] == ["ab" * 50] * 3
    name = "octavo_admission_rejections_total max_num_queued_requests"
    eventually(lambda: pb_utils.MetricFamily.series[name].values == [1])


@pytest.mark.parametrize("stream", [False, True])
def test_timing_comes_with_the_last_response_alone(
    make_service: MakeService, ask: Ask, stream: bool
) -> None:
    serving = make_service()
    prompt = "abcdefghijklmnop"
    for num_cached in (0, 15):
        sender = ask(serving, prompt, stream=stream, max_tokens=20, return_timing=True)
        *others, last = sender.wait_final().responses
        assert json.loads(last.output("timing")) == {
            "queue_ms": 1.0,
            "prefill_ms": 2.0,
            "decode_ms": 60.0,
            "preempted_ms": 0.0,
            "cached_tokens": num_cached,
            "preemptions": 0,
        }
        names = {tensor.name() for response in others for tensor in response.output_tensors}
        assert names <= {"text_output"}


def test_the_cache_of_one_salt_is_not_anothers(make_service: MakeService, ask: Ask) -> None:
    serving = make_service()
    cached = []
    for salt in ("mine", "theirs", "mine"):
        sender = ask(serving, "abcd", max_tokens=1, cache_salt=salt, return_timing=True)
        (response,) = sender.wait_final().responses
        cached.append(json.loads(response.output("timing"))["cached_tokens"])
    assert cached == [0, 0, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_has_its_timing_too(
    make_service: MakeService, ask: Ask, stream: bool
) -> None:
    sender = ask(
        make_service(),
        "abcd",
        n=2,
        stream=stream,
        stop="cd",
        max_tokens=50,
        exclude_input_in_output=True,
        return_timing=True,
        return_finish_reason=True,
    ).wait_final()
    *_, last = sender.responses
    assert last.output("finish_reason") == ["stop", "stop"]
    assert json.loads(last.output("timing"))["decode_ms"] >= 9.0
    texts = zip(*(response.output("text_output") for response in sender.responses), strict=True)
    assert ["".join(text) for text in texts] == ["ab", "b"]


def test_timing_is_of_the_answer_that_ended_last(make_service: MakeService, ask: Ask) -> None:
    """The second answer meets the stop string one token earlier."""
    sender = ask(make_service(), "abcdefgh", n=2, stop="h", max_tokens=50, return_timing=True)
    (response,) = sender.wait_final().responses
    assert json.loads(response.output("timing"))["decode_ms"] >= 24.0
