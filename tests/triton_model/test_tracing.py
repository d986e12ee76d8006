"""A span for each request: whose child it is, what it says, and that nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from octavo.errors import InvalidRequest
from octavo.request import FinishReason, SequenceTiming
from octavo.triton_model import tracing
from octavo.triton_model.request_record import RequestRecord
from octavo.triton_model.tracing import RequestTracer, make_tracer

CANARY = "canary-7531"
TRACE, PARENT = "a" * 32, "b" * 16
CONTEXT = f'{{"traceparent": "00-{TRACE}-{PARENT}-01"}}'
TIMING = SequenceTiming(0.25, 0.5, 1.25, 0.125, num_cached_tokens=16, num_preemptions=1)


class FakeReceiver(SpanExporter):
    """Keeps what it is sent, by name; while it is stuck, nothing comes back from it."""

    def __init__(self) -> None:
        self.spans: dict[str, ReadableSpan] = {}
        self.free = threading.Event()
        self.free.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.free.wait()
        self.spans |= {span.name: span for span in spans}
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.free.set()


@pytest.fixture
def receiver() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    yield receiver
    receiver.free.set()


@pytest.fixture
def spans_of(receiver: FakeReceiver) -> Callable[..., dict[str, ReadableSpan]]:
    """Return a function that makes the spans of one request, of 2 s but for what is given."""

    def make(**changes: Any) -> dict[str, ReadableSpan]:
        tracer = RequestTracer(receiver, "octavo")
        tracer(_record(**changes))
        tracer.close()
        return receiver.spans

    return make


def _record(**changes: Any) -> RequestRecord:
    fields = {
        "request_id": "12",
        "client_request_id": "abc",
        "trace_context": CONTEXT,
        "arrival_s": 5.0,
        "first_token_s": 5.75,
        "end_s": 7.0,
        "num_prompt_tokens": 20,
        "num_generated_tokens": 16,
        "finish_reason": FinishReason.STOP,
        "timing": TIMING,
    }
    return RequestRecord(**(fields | changes))


def _length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e9, 3)


def test_a_requests_span_is_the_child_of_the_servers(
    spans_of: Callable[..., dict[str, ReadableSpan]],
) -> None:
    span = spans_of()["octavo.request"]
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.resource.attributes["service.name"] == "octavo"


def test_a_span_speaks_the_conventions_of_generative_models(
    spans_of: Callable[..., dict[str, ReadableSpan]],
) -> None:
    span = spans_of()["octavo.request"]
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "octavo",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.75,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "octavo.request_id": "12",
        "octavo.preemptions": 1,
        "octavo.preempted_ms": 125.0,
        "triton.request_id": "abc",
    }


def test_queue_prefill_and_decode_fill_the_span_one_behind_the_other(
    spans_of: Callable[..., dict[str, ReadableSpan]],
) -> None:
    spans = spans_of()
    lengths = {name: _length_s(span) for name, span in spans.items()}
    assert lengths == {"octavo.request": 2.0, "queue": 0.25, "prefill": 0.5, "decode": 1.25}
    whole, queue, prefill, decode = (
        spans[name] for name in ("octavo.request", "queue", "prefill", "decode")
    )
    times = [whole.start_time, queue.end_time, prefill.end_time, whole.end_time]
    assert [queue.start_time, prefill.start_time, decode.start_time, decode.end_time] == times
    for phase in (queue, prefill, decode):
        assert phase.parent is not None
        assert phase.parent.span_id == whole.context.span_id


@pytest.mark.parametrize(
    ("timing", "phases"),
    [
        (None, set()),
        (SequenceTiming(queue_s=2.0), {"queue"}),
        (SequenceTiming(queue_s=1.0, prefill_s=1.0), {"queue", "prefill"}),
    ],
)
def test_a_request_without_a_token_has_the_phases_it_came_to(
    spans_of: Callable[..., dict[str, ReadableSpan]],
    timing: SequenceTiming | None,
    phases: set[str],
) -> None:
    spans = spans_of(timing=timing, first_token_s=None, finish_reason=FinishReason.DEADLINE)
    assert spans.keys() == {"octavo.request", *phases}


def test_an_error_has_its_code_and_not_its_message(
    spans_of: Callable[..., dict[str, ReadableSpan]],
) -> None:
    error = InvalidRequest(f"stop is {CANARY}")
    span = spans_of(error=error, finish_reason=FinishReason.ERROR)["octavo.request"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "INVALID_ARG")
    assert (span.attributes or {})["error.type"] == "INVALID_ARG"
    assert CANARY not in span.to_json()


@pytest.mark.parametrize("context", ["", '{"traceparent": "00-nonsense"}'])
def test_a_request_of_no_trace_begins_one(
    spans_of: Callable[..., dict[str, ReadableSpan]], context: str
) -> None:
    assert spans_of(trace_context=context)["octavo.request"].parent is None


def test_a_trace_that_is_not_sampled_gets_no_spans(
    spans_of: Callable[..., dict[str, ReadableSpan]],
) -> None:
    assert spans_of(trace_context=CONTEXT.replace("-01", "-00")) == {}


def test_only_traces_that_others_began_get_spans_if_the_sampler_says_so(
    spans_of: Callable[..., dict[str, ReadableSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    assert spans_of(trace_context="") == {}
    assert "octavo.request" in spans_of()


def test_nobody_waits_for_a_receiver_that_is_stuck(
    receiver: FakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.2)
    receiver.free.clear()
    tracer = RequestTracer(receiver, "octavo")
    began = time.monotonic()
    for _ in range(1000):  # more than one batch, fewer than the queue holds
        tracer(_record())
    assert time.monotonic() - began < 5.0
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 2.0


def test_nobody_waits_for_a_receiver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.5)
    tracer = make_tracer("http://127.0.0.1:9/v1/traces", "octavo")  # a port nobody listens on
    tracer(_record())
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 3.0
