"""docs/observability.md names the fields of a line and the attributes of a span as they are."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from octavo.errors import RequestCancelled
from octavo.process_log import JsonFormatter
from octavo.request import FinishReason, SequenceTiming
from octavo.triton_model.request_log import log_request
from octavo.triton_model.request_record import RequestRecord
from octavo.triton_model.tracing import RequestTracer

DOCUMENT = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")

#: One of which everything is known: it had tokens, and ended in an error.
RECORD = RequestRecord(
    request_id="12",
    client_request_id="abc",
    trace_context=f'{{"traceparent": "00-{"a" * 32}-{"b" * 16}-01"}}',
    arrival_s=5.0,
    first_token_s=5.5,
    end_s=7.0,
    num_prompt_tokens=20,
    num_generated_tokens=16,
    finish_reason=FinishReason.ABORT,
    error=RequestCancelled("the client cancelled the request"),
    timing=SequenceTiming(0.1, 0.4, 1.5, 0.0, num_cached_tokens=16, num_preemptions=1),
    lora_name="legal",
)


class Receiver(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def first_column(heading: str, number: int = 0) -> set[str]:
    """Return the names in the first column of a table with such a heading."""
    table = DOCUMENT.split(f"\n| {heading} |")[1 + number].split("\n\n")[0]
    cells = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_the_fields_of_a_line_are_those_of_the_two_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log_request(RECORD)
    of_request = set(json.loads(JsonFormatter("stub").format(caplog.records[-1])))
    try:
        raise OSError
    except OSError:
        failed = logging.LogRecord("octavo", logging.ERROR, "", 0, "", None, sys.exc_info())
    of_any_line = set(json.loads(JsonFormatter("stub").format(failed)))
    assert first_column("field", 0) == of_any_line
    assert first_column("field", 1) == of_request - of_any_line


def test_spans_and_attributes_are_those_of_the_tables() -> None:
    receiver = Receiver()
    tracer = RequestTracer(receiver, "octavo")
    tracer(RECORD)
    tracer.close()
    assert first_column("span") == {span.name for span in receiver.spans}
    (whole,) = (span for span in receiver.spans if span.name == "octavo.request")
    assert first_column("attribute") == set(whole.attributes or {})
