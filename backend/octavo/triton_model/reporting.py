"""Makes a record of every request that got its final answer, and tells those who want to know.

Knows nothing of tensors, of threads or of what the reporters do.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from octavo.errors import OctavoError, QueueFull, RequestError
from octavo.request import FinishReason, TokenOutput
from octavo.triton_model.exchange import Arrival
from octavo.triton_model.live_request import LiveRequest
from octavo.triton_model.request_record import Reporter, RequestRecord

#: Ends after which the engine still says where the time went.
_TIMED_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)

logger = logging.getLogger(__name__)


class Reports:
    """Tells every reporter once of every request, after its final answer was sent.

    Any thread may call `refuse`; the other methods are for the thread that answers. A request that
    a stop string ended is told of when the engine has said where its time went.
    """

    def __init__(self, reporters: tuple[Reporter, ...]) -> None:
        self._reporters = reporters
        self._untimed: dict[str, tuple[LiveRequest, RequestRecord]] = {}

    def refuse(self, arrival: Arrival, error: OctavoError) -> None:
        """Tell of a request that was answered with an error before it had a name."""
        self._tell(
            RequestRecord(
                request_id="",
                client_request_id=arrival.client_request_id,
                trace_context=arrival.trace_context,
                arrival_s=arrival.time_s,
                first_token_s=None,
                end_s=time.monotonic(),
                num_prompt_tokens=0,
                num_generated_tokens=0,
                finish_reason=FinishReason.ERROR,
                was_refused=True,
                error=error,
            )
        )

    def end(
        self,
        live: LiveRequest,
        reason: FinishReason,
        error: OctavoError | None = None,
        was_refused: bool = False,
    ) -> None:
        """Tell of a request that has its final answer, at once or when its timing is there."""
        first_token_s = live.meter.first_token_s
        is_at_fault = isinstance(error, RequestError | QueueFull) and first_token_s is None
        record = RequestRecord(
            request_id=live.request_id,
            client_request_id=live.arrival.client_request_id,
            trace_context=live.arrival.trace_context,
            arrival_s=live.arrival.time_s,
            first_token_s=first_token_s,
            end_s=time.monotonic(),
            num_prompt_tokens=len(live.request.prompt_token_ids),
            num_generated_tokens=live.meter.num_tokens,
            finish_reason=reason,
            was_refused=was_refused or is_at_fault,
            error=error,
            lora_name=live.request.params.lora_name,
            timing=live.timing,
        )
        if reason in _TIMED_ENDS and live.timing is None:
            self._untimed[live.request_id] = live, record
        else:
            self._tell(record)

    def take_late(self, output: TokenOutput) -> None:
        """Take what the engine still says of a request that has its final answer."""
        if output.request_id not in self._untimed:
            return
        live, record = self._untimed[output.request_id]
        live.take_timing(output)
        if live.timing is not None:
            del self._untimed[output.request_id]
            self._tell(replace(record, timing=live.timing))

    def wait_no_longer(self) -> None:
        """Tell of those whose timing is not there yet; the engine that had it is gone."""
        while self._untimed:
            _, (_, record) = self._untimed.popitem()
            self._tell(record)

    def _tell(self, record: RequestRecord) -> None:
        for reporter in self._reporters:
            try:
                reporter(record)
            except Exception:
                logger.exception("a finished request could not be reported")
