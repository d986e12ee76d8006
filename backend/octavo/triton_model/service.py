"""A loaded model that takes requests in: engine, tokenizer and response writer, wired.

Knows nothing of how a step works, of tensor names or of the life of one request.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient, EngineState
from octavo.errors import EngineDead, EngineError, OctavoError
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.admission import admit
from octavo.triton_model.arrival import read_arrival
from octavo.triton_model.codec import decode_request
from octavo.triton_model.exchange import Arrival, DecodedRequest
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.pb_utils import InferenceRequest, PbUtils, ResponseSender
from octavo.triton_model.prompt_threads import PromptThreads
from octavo.triton_model.questions import LiveHealth, LiveInspection, read_question
from octavo.triton_model.reporting import Reports
from octavo.triton_model.request_record import Reporter
from octavo.triton_model.response_writer import ResponseWriter, send_error
from octavo.triton_model.unload_watch import UnloadWatch

logger = logging.getLogger(__name__)


class Service:
    """Takes requests in and answers every one of them; the engine must be ready.

    Each of `reporters` is told of every request after its final answer.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        pb_utils: PbUtils,
        metrics: EngineMetrics,
        reporters: tuple[Reporter, ...],
        config: EngineConfig,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._pb_utils = pb_utils
        self._allow_inspect = config.allow_inspect
        self._drain_timeout_s = config.drain_timeout_s
        self._reports = Reports(reporters)
        self._writer = ResponseWriter(
            client, pb_utils, metrics, self._reports, config.drain_timeout_s
        )
        self._max_prompt_bytes = config.max_prompt_bytes
        self._prompts = PromptThreads()
        self._unloads: UnloadWatch | None = None
        self._has_accepted = False
        self._writer.start()

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now would be served rather than refused or left waiting."""
        is_running = self._client.state is EngineState.READY and not self._client.is_frozen
        return is_running and not self._writer.is_draining

    def watch_unloads(self, is_refusing: Callable[[], bool]) -> None:
        """End everything in time, too, when Triton says that it takes no requests for the model."""
        self._unloads = UnloadWatch(is_refusing, self._is_serving, self._end_unloaded)

    def accept(self, request: InferenceRequest) -> None:
        """Copy a request and answer it later; a wrong one is answered at once. Never raises."""
        self._has_accepted = True
        arrival = read_arrival(request, time.monotonic())
        sender = request.get_response_sender()
        try:
            question = read_question(request, sender, self._allow_inspect)
            if question is not None:
                self._ask(question)
                return
            vocab_size = self._client.info.vocab_size
            decoded = decode_request(request, vocab_size, self._max_prompt_bytes)
            hand_over = functools.partial(self._hand_over, decoded, sender, arrival)
            self._prompts.run(decoded.prompt_length, hand_over)
        except Exception as error:
            self._refuse(sender, arrival, error)

    def close(self) -> None:
        """Refuse new requests, let live ones finish until the timeout, and end everything."""
        if self._unloads is not None:
            self._unloads.stop()
        self._prompts.close()
        self._writer.stop()

    def _is_serving(self) -> bool:
        # Until it has had a request Triton may not take any yet, and nothing keeps it from leaving.
        return self._has_accepted and self.is_ready

    def _end_unloaded(self) -> None:
        logger.info(
            "Triton takes no more requests for the model; live ones get %g s", self._drain_timeout_s
        )
        self._writer.end()

    def _ask(self, question: LiveInspection | LiveHealth) -> None:
        try:
            self._writer.submit(question)
        except EngineDead as error:
            send_error(self._pb_utils, question.sender, error)  # no request that is counted

    def _hand_over(self, decoded: DecodedRequest, sender: ResponseSender, arrival: Arrival) -> None:
        try:
            live = admit(decoded, sender, self._tokenizer, self._client.info, arrival)
            self._writer.submit(live)
        except Exception as error:
            self._refuse(sender, arrival, error)

    def _refuse(self, sender: ResponseSender, arrival: Arrival, error: Exception) -> None:
        if not isinstance(error, OctavoError):
            # Its text may show paths of the server, so only the log gets it.
            logger.error("a request could not be taken in", exc_info=error)
            error = EngineError("the server could not take the request in; its log says why")
        send_error(self._pb_utils, sender, error)
        self._reports.refuse(arrival, error)
