"""What the log says of each request, and what it never says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.process_log import JsonFormatter
from octavo.request import FinishReason, SequenceTiming
from octavo.triton_model import service
from octavo.triton_model.request_log import log_request
from octavo.triton_model.request_record import RequestRecord
from octavo.triton_model.service import Service

CANARY = "canary-7531"
TIMING = SequenceTiming(0.01, 0.02, 0.21, 0.0, num_cached_tokens=0, num_preemptions=0)

MakeRecord = Callable[..., RequestRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """Make records of a request that got 16 tokens for 20 in 0.24 s, but for what is given."""

    def make(**changes: Any) -> RequestRecord:
        fields = {
            "request_id": "12",
            "client_request_id": "abc",
            "trace_context": "",
            "arrival_s": 5.0,
            "first_token_s": 5.03,
            "end_s": 5.24,
            "num_prompt_tokens": 20,
            "num_generated_tokens": 16,
            "finish_reason": FinishReason.STOP,
            "timing": TIMING,
        }
        return RequestRecord(**(fields | changes))

    return make


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[RequestRecord], logging.LogRecord]:
    """Return a function that logs a request and gives the line."""
    caplog.set_level(logging.INFO)

    def log(record: RequestRecord) -> logging.LogRecord:
        log_request(record)
        return caplog.records[-1]

    return log


def test_the_adapter_is_told_if_there_is_one(make_record, logged):
    assert logged(make_record(lora_name="legal")).fields["lora_name"] == "legal"
    assert "lora_name" not in logged(make_record()).fields


REFUSED = {
    "request_id": "",
    "first_token_s": None,
    "num_prompt_tokens": 0,
    "num_generated_tokens": 0,
    "finish_reason": FinishReason.ERROR,
    "error": InvalidRequest(f"stop is {CANARY}"),
    "timing": None,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "request 12 (abc): stop, 20+16 tokens, 0.24 s, first after 0.03 s"),
        (
            {"client_request_id": ""},
            "request 12: stop, 20+16 tokens, 0.24 s, first after 0.03 s",
        ),
        (
            {"timing": SequenceTiming(num_cached_tokens=16, num_preemptions=2)},
            "request 12 (abc): stop, 20 (16 cached)+16 tokens, 0.24 s, first after 0.03 s, "
            "preemptions: 2",
        ),
        (REFUSED, "request (abc): INVALID_ARG, 0+0 tokens, 0.24 s"),
        (
            {"client_request_id": "a\n17:00:00 ERROR b\x1b[31m"},
            "request 12 (a?17:00:00 ERROR b?[31m): stop, 20+16 tokens, 0.24 s, first after 0.03 s",
        ),
    ],
)
def test_a_request_is_one_line_that_reads_at_a_glance(
    logged: Callable[..., Any], make_record: MakeRecord, changes: dict[str, Any], sentence: str
) -> None:
    line = logged(make_record(**changes))
    assert (line.levelname, line.getMessage()) == ("INFO", sentence)


def test_a_line_of_json_has_every_figure(
    logged: Callable[..., Any], make_record: MakeRecord
) -> None:
    context = f'{{"traceparent": "00-{"a" * 32}-{"b" * 16}-01"}}'
    line = json.loads(JsonFormatter("stub").format(logged(make_record(trace_context=context))))
    figures = set(line) - {"time", "level", "logger", "process", "pid", "message"}
    assert {name: line[name] for name in figures} == {
        "request_id": "12",
        "client_request_id": "abc",
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "generated_tokens": 16,
        "cached_tokens": 0,
        "preemptions": 0,
        "first_token_ms": 30.0,
        "queue_ms": 10.0,
        "prefill_ms": 20.0,
        "decode_ms": 210.0,
        "preempted_ms": 0.0,
        "total_ms": 240.0,
        "trace_id": "a" * 32,
    }


def test_a_refused_request_has_its_code_and_not_its_message(
    logged: Callable[..., Any], make_record: MakeRecord
) -> None:
    text = JsonFormatter("stub").format(logged(make_record(**REFUSED)))
    line = json.loads(text)
    assert (line["error"], line["error_type"]) == ("INVALID_ARG", "InvalidRequest")
    assert line["finish_reason"] == "error"
    assert not {"queue_ms", "first_token_ms", "trace_id"} & line.keys()
    assert CANARY not in text


def test_a_service_logs_the_names_of_its_requests_and_nothing_of_what_they_say(
    make_service: Callable[..., Service],
    make_request: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    serving = make_service(reporters=(log_request,))
    good = {"text_input": CANARY, "parameters": {"max_tokens": 2}, "request_id": "mine"}
    wrong = {"text_input": CANARY, "parameters": {"stop": [CANARY, ""]}, "request_id": "wrong"}
    for request in [make_request(**tensors) for tensors in (good, wrong)]:
        serving.accept(request)
        request.sender.wait_final()

    def fail(*args: Any) -> None:
        raise ValueError(CANARY)

    monkeypatch.setattr(service, "admit", fail)
    unforeseen = make_request(text_input=CANARY, request_id="unforeseen")
    serving.accept(unforeseen)
    assert CANARY not in unforeseen.sender.error.message
    serving.close()
    formatter = JsonFormatter("stub")
    text = "\n".join(map(formatter.format, caplog.records))
    assert "(mine): length, 11+2 tokens" in text
    assert "request (wrong): INVALID_ARG, 0+0 tokens" in text
    assert "request (unforeseen): INTERNAL, 0+0 tokens" in text
    assert "ValueError: (not shown" in text
    assert CANARY not in text
