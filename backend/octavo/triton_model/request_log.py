"""One line of the log for each request: how it ended, its tokens, and where its time went.

No prompt, no answer and no message of an error is in it, for these quote what clients send. Knows
nothing of how lines are written.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from octavo.errors import code_of
from octavo.request import SequenceTiming
from octavo.triton_model.request_record import RequestRecord

_TRACE_ID = re.compile(r'"traceparent": *"[0-9a-f]{2}-([0-9a-f]{32})-')

logger = logging.getLogger(__name__)


def log_request(record: RequestRecord) -> None:
    """Log a finished request; its figures are fields of a JSON line."""
    logger.info("%s", _sentence(record), extra={"fields": _fields(record)})


def _sentence(record: RequestRecord) -> str:
    """Return what a reader wants first, such as `request 12 (abc): stop, 20+16 tokens, 0.24 s`."""
    client_id = _printable(record.client_request_id)
    name = " ".join(filter(None, ["request", record.request_id, client_id and f"({client_id})"]))
    timing = record.timing or SequenceTiming()
    cached = f" ({timing.num_cached_tokens} cached)" if timing.num_cached_tokens else ""
    parts = [
        record.finish_reason.value if record.error is None else code_of(record.error),
        f"{record.num_prompt_tokens}{cached}+{record.num_generated_tokens} tokens",
        f"{record.end_s - record.arrival_s:.2f} s",
    ]
    if record.first_token_s is not None:
        parts.append(f"first after {record.first_token_s - record.arrival_s:.2f} s")
    if timing.num_preemptions:
        parts.append(f"preemptions: {timing.num_preemptions}")
    return f"{name}: {', '.join(parts)}"


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "finish_reason": record.finish_reason.value,
        "prompt_tokens": record.num_prompt_tokens,
        "generated_tokens": record.num_generated_tokens,
        "total_ms": _ms(record.end_s - record.arrival_s),
    }
    if record.error is not None:
        fields["error"] = code_of(record.error)
        fields["error_type"] = type(record.error).__name__
    if record.lora_name is not None:
        fields["lora_name"] = record.lora_name
    if record.first_token_s is not None:
        fields["first_token_ms"] = _ms(record.first_token_s - record.arrival_s)
    if (timing := record.timing) is not None:
        fields |= {
            "cached_tokens": timing.num_cached_tokens,
            "preemptions": timing.num_preemptions,
            "queue_ms": _ms(timing.queue_s),
            "prefill_ms": _ms(timing.prefill_s),
            "decode_ms": _ms(timing.decode_s),
            "preempted_ms": _ms(timing.preempted_s),
        }
    if match := _TRACE_ID.search(record.trace_context):
        fields["trace_id"] = match[1]
    return fields


def _printable(text: str) -> str:
    """Return a client's text without what could end or paint a line of the log."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
