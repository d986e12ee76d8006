"""A span of OpenTelemetry for each request, below the span of the server or of the client.

Spans are made when a request has ended, and sent in batches by a thread of the library: its queue
is bounded, and what does not fit is dropped. Needs the extra `tracing`. Holds no prompt and no
message of an error. Knows nothing of tensors or of how a request is answered.
"""

from __future__ import annotations

import json
import os
import threading
import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from octavo import __version__
from octavo.errors import code_of
from octavo.triton_model.request_record import RequestRecord

#: What one batch gets to reach its receiver, and what all that waits gets when the model unloads.
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

_propagator = TraceContextTextMapPropagator()


class RequestTracer:
    """Makes spans of finished requests and sends them; any thread may call it.

    Args:
        exporter: where the spans go.
        model: the name clients ask for.
    """

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        self._exporter = exporter
        self._model = model
        name = os.environ.get("OTEL_SERVICE_NAME", "octavo")
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)

    def __call__(self, record: RequestRecord) -> None:
        """Make the spans of one request; they are sent later."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        end_ns = offset_ns + _ns(record.end_s)
        span = self._tracer.start_span(
            "octavo.request",
            _parent(record.trace_context),
            SpanKind.SERVER,
            self._attributes(record),
            start_time=offset_ns + _ns(record.arrival_s),
        )
        if span.is_recording():
            inside = trace.set_span_in_context(span)
            for name, start_s, phase_end_s in _phases(record):
                start_ns = offset_ns + _ns(start_s)
                phase = self._tracer.start_span(name, inside, start_time=start_ns)
                phase.end(offset_ns + _ns(phase_end_s))
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, code_of(record.error)))
        span.end(end_ns)

    def close(self) -> None:
        """Send what waits, for a bounded time; what is left then is dropped."""
        # The library's own end takes up to half a minute when its receiver does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._exporter.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, AttributeValue]:
        """Return what OpenTelemetry's conventions for generative models name, and our own."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": [record.finish_reason.value],
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "octavo.request_id": record.request_id,
        }
        if record.client_request_id:
            attributes["triton.request_id"] = record.client_request_id
        if record.first_token_s is not None:
            first_s = record.first_token_s - record.arrival_s
            attributes["gen_ai.response.time_to_first_chunk"] = first_s
        if (timing := record.timing) is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = timing.num_cached_tokens
            attributes["octavo.preemptions"] = timing.num_preemptions
            attributes["octavo.preempted_ms"] = timing.preempted_s * 1000.0
        if record.error is not None:
            attributes["error.type"] = code_of(record.error)
        return attributes


def make_tracer(endpoint: str, model: str) -> RequestTracer:
    """Return a tracer that sends to `endpoint`.

    The library reads certificates, headers and the sampler from variables of its own (`OTEL_…`).
    """
    return RequestTracer(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S), model)


def _parent(trace_context: str) -> Context:
    """Return the context a span begins in: an empty one if there is none, or none that is valid."""
    carrier = json.loads(trace_context) if trace_context else {}
    return _propagator.extract(carrier, Context())


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Return name, begin and end of what a request went through, one behind the other.

    Time after a preemption lies in the phase that was interrupted.
    """
    if record.timing is None:
        return []
    seated_s = min(record.arrival_s + record.timing.queue_s, record.end_s)
    phases = [("queue", record.arrival_s, seated_s)]
    if record.first_token_s is None:
        return [*phases, ("prefill", seated_s, record.end_s)] if record.timing.prefill_s else phases
    first_s = max(seated_s, record.first_token_s)
    return [*phases, ("prefill", seated_s, first_s), ("decode", first_s, record.end_s)]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
