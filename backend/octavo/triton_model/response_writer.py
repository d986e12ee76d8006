"""The thread that answers: it owns the engine client and every request from hand-over to final.

A request leaves `_live` before its final response is sent, and only this thread sends for it: that
is why each gets exactly one final flag and nothing after it. Knows nothing of tensor names or of
how text is made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from octavo.engine_client import EngineClient, EngineDied, Event
from octavo.engine_messages import EngineReady, Inspected, StopRequested
from octavo.errors import EngineDead, EngineError, OctavoError, RequestCancelled, code_of
from octavo.request import FinishReason, StepOutput, TokenOutput
from octavo.triton_model.client_round import ClientRound
from octavo.triton_model.codec import encode_error, encode_response
from octavo.triton_model.live_request import LiveRequest, missed_deadline
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.pb_utils import PbUtils, ResponseSender
from octavo.triton_model.questions import Health, LiveHealth, LiveInspection
from octavo.triton_model.reporting import Reports

#: Where the engine computes on the host's own cores, each response takes from it. So after a round
#: of many responses tokens wait this long for each of them, and those of one request are joined.
JOIN_S_PER_RESPONSE = 0.003
MAX_JOIN_S = 0.1
#: A round of so few costs little, and nobody waits for it.
FEW_RESPONSES = 8
#: Pause after a turn that failed, for a lasting fault must not burn a core.
FAILURE_PAUSE_S = 0.02
#: What the engine gets to end by itself.
ENGINE_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)

Live = LiveRequest | LiveInspection | LiveHealth


def send_error(pb_utils: PbUtils, sender: ResponseSender, error: BaseException) -> None:
    """Send an error with the final flag; a sender that is broken is only logged."""
    try:
        sender.send(
            encode_error(pb_utils, error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )
    except Exception:
        logger.exception("an error response could not be sent: %s", code_of(error))


class ResponseWriter:
    """Passes requests to the engine and its tokens to clients.

    Any thread may call `submit`. After `start` the writer's thread alone uses `client`. Requests
    that are live when the writer or the whole server is to stop get `drain_timeout_s` to finish.
    """

    def __init__(
        self,
        client: EngineClient,
        pb_utils: PbUtils,
        metrics: EngineMetrics,
        reports: Reports,
        drain_timeout_s: float,
    ) -> None:
        self._client = client
        self._pb_utils = pb_utils
        self._metrics = metrics
        self._reports = reports
        self._handed_over: deque[Live] = deque()
        self._live: dict[str, Live] = {}
        self._due: dict[str, Live] = {}
        self._joining: dict[str, Live] = {}
        self._join_until_s = 0.0
        self._round = ClientRound()
        self._drain_timeout_s = drain_timeout_s
        self._end_live_at_s: float | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="response-writer", daemon=True)

    @property
    def is_draining(self) -> bool:
        """Whether live requests are being finished, for the model or the server stops."""
        return self._end_live_at_s is not None

    def start(self) -> None:
        """Begin to answer; the engine must be ready."""
        self._metrics.start()
        self._metrics.engine_ready(self._client.info)
        self._thread.start()

    def submit(self, live: Live) -> None:
        """Hand over a request: from now on the writer answers it, whatever happens.

        Raises:
            EngineDead: the writer is stopping; the caller must answer.
        """
        with self._lock:
            if self._is_closing:
                raise EngineDead("the model is being unloaded and takes no more requests")
            self._handed_over.append(live)
        self._client.wake()

    def end(self) -> None:
        """Refuse new requests, let live ones finish until the timeout, and end everything, soon."""
        with self._lock:
            self._is_closing = True
        self._client.wake()

    def stop(self) -> None:
        """Do what `end` does, and wait for it."""
        self.end()
        self._thread.join()

    def _end_live_soon(self) -> None:
        if self._end_live_at_s is None:
            self._end_live_at_s = time.monotonic() + self._drain_timeout_s

    def _run(self) -> None:
        while self._live or self._handed_over or not self._is_closing:
            try:
                self._turn()
            except Exception:
                logger.exception("the response writer failed; it ends all requests and goes on")
                self._reports.wait_no_longer()
                self._fail_all(EngineError("the server failed to answer; its log says why"))
                time.sleep(FAILURE_PAUSE_S)
        self._reports.wait_no_longer()
        self._metrics.engine_gone()
        self._metrics.close()
        self._client.close(ENGINE_CLOSE_TIMEOUT_S)

    def _turn(self) -> None:
        """Take what has come from both sides, and send what is due, joined by request."""
        if self._is_closing:
            self._end_live_soon()
        self._admit()
        for event in self._client.poll(self._timeout_s(), is_waited_for=bool(self._live)):
            self._handle(event)
        self._send_due()
        self._ask_clients()
        if self._end_live_at_s is not None and time.monotonic() >= self._end_live_at_s:
            self._fail_all(EngineDead("the server stops before the request is finished"))

    def _timeout_s(self) -> float | None:
        """Return how long nothing is due unless the engine or a new request says otherwise."""
        if not self._live:
            return 0.0 if self._is_closing else None
        due_s = self._round.next_s
        if self._joining:
            due_s = min(due_s, self._join_until_s)
        if self._end_live_at_s is not None:
            due_s = min(due_s, self._end_live_at_s)
        return max(0.0, due_s - time.monotonic())

    def _admit(self) -> None:
        client = self._client
        while self._handed_over:
            live = self._handed_over.popleft()
            if isinstance(live, LiveHealth):
                live.take(Health(client.state, self.is_draining, client.is_frozen, len(self._live)))
                self._send(live)
                continue
            try:
                client.submit(live.request)
            except EngineDead as error:
                send_error(self._pb_utils, live.sender, error)
                self._report(live, FinishReason.ERROR, error, was_refused=True)
            else:
                self._live[live.request_id] = live

    def _handle(self, event: Event) -> None:
        if isinstance(event, StepOutput):
            self._metrics.step(event.stats)
            now_s = time.monotonic()
            for output in event.outputs:
                self._take(output, now_s)
        elif isinstance(event, Inspected):
            self._take_inspection(event)
        elif isinstance(event, EngineReady):
            self._metrics.engine_ready(event.info)
        elif isinstance(event, StopRequested):
            logger.info("told to stop; live requests get %g s", self._drain_timeout_s)
            self._end_live_soon()
        elif isinstance(event, EngineDied):
            self._metrics.engine_gone()
            self._reports.wait_no_longer()
            self._fail_all(EngineDead(event.message))

    def _take(self, output: TokenOutput, now_s: float) -> None:
        live = self._live.get(output.request_id)
        if not isinstance(live, LiveRequest):
            self._reports.take_late(output)  # answered: cancelled, or past its stop string
            return
        if output.finish_reason is FinishReason.ERROR:
            self._fail(live, output.error or EngineError("the engine could not finish the request"))
            return
        try:
            is_cut, new_tokens = live.take(output, now_s)
            if is_cut:
                self._client.abort(live.request_id, FinishReason.STOP, output.index)
        except Exception:
            logger.exception("tokens of a request could not be turned into text")
            self._fail(live, EngineError("the tokens could not be turned into text"))
            return
        self._metrics.count_tokens(new_tokens, len(live.request.prompt_token_ids))
        if live.has_missed_deadline:
            self._fail(live, missed_deadline(live.request), FinishReason.DEADLINE)
        elif live.has_response:
            (self._joining if live.can_wait else self._due)[live.request_id] = live
        else:
            self._drop_due(live)  # what was its next response became its last

    def _take_inspection(self, event: Inspected) -> None:
        live = self._live.get(event.request_id)
        if isinstance(live, LiveInspection):
            live.take(event.inspection)
            self._due[live.request_id] = live

    def _send_due(self) -> None:
        """Send what must go now and, when it is their time, the tokens that have been joined."""
        now_s, num_sent = time.monotonic(), 0
        if is_their_time := now_s >= self._join_until_s:
            self._due |= self._joining
            self._joining.clear()
        while self._due:
            self._send(self._due.pop(next(iter(self._due))))
            self._admit()  # a new request need not wait for every response
            num_sent += 1
        if is_their_time and num_sent > FEW_RESPONSES and self._client.info.computes_on_host:
            self._join_until_s = now_s + min(num_sent * JOIN_S_PER_RESPONSE, MAX_JOIN_S)

    def _send(self, live: Live) -> None:
        try:
            data, flags = live.pop_response(), 0
            if data.is_final:
                self._forget(live)
                flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            response = encode_response(self._pb_utils, data, live.options.outputs)
            live.sender.send(response, flags=flags)
        except Exception:
            logger.exception("a response could not be sent")
            error = EngineError("the response could not be sent; the server's log says why")
            self._end(live, error, FinishReason.ERROR)
            return
        if data.is_final and (reason := data.answers[0].finish_reason) is not None:
            self._report(live, reason)

    def _ask_clients(self) -> None:
        """End the requests of clients that are gone, as far as it is their turn to be asked."""
        for live in self._round.due(self._live, time.monotonic()):
            try:
                if live.sender.is_cancelled():
                    error = RequestCancelled("the client cancelled the request")
                    self._fail(live, error, FinishReason.ABORT)
            except Exception:
                logger.exception("the server did not say whether a request is cancelled")
                self._fail(live, EngineError("the request lost its connection to the server"))

    def _fail_all(self, error: OctavoError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)

    def _fail(
        self, live: Live, error: OctavoError, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """Send what is due, if somebody waits for it; unless that was its end, end it now."""
        if self._drop_due(live) and reason is not FinishReason.ABORT:
            self._send(live)
        if live.request_id in self._live:
            self._end(live, error, reason)

    def _end(self, live: Live, error: OctavoError, reason: FinishReason) -> None:
        """End a request with an error, here and in the engine."""
        self._forget(live)
        self._client.abort(live.request_id, FinishReason.ABORT)
        send_error(self._pb_utils, live.sender, error)
        self._report(live, reason, error)

    def _forget(self, live: Live) -> None:
        self._live.pop(live.request_id, None)
        self._drop_due(live)

    def _drop_due(self, live: Live) -> bool:
        """Forget what is due of it; return whether there was something."""
        due = self._due.pop(live.request_id, None), self._joining.pop(live.request_id, None)
        return due != (None, None)

    def _report(
        self,
        live: Live,
        reason: FinishReason,
        error: OctavoError | None = None,
        was_refused: bool = False,
    ) -> None:
        if isinstance(live, LiveRequest):
            self._reports.end(live, reason, error, was_refused)
