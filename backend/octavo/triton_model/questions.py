"""A client's question about the engine: a request without tensors, answered with JSON.

It is a parameter that is true: `inspect` for the engine's sequences and blocks, which the engine
itself tells, or `health` for what its owner knows of it, which is answered even while the engine is
dead, busy or frozen. Knows nothing of threads or of what the answers say.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass

from octavo.engine_messages import Inspect
from octavo.errors import InvalidRequest
from octavo.inspection import Inspection
from octavo.request import FinishReason
from octavo.request_keys import read_json_object, refused
from octavo.triton_model.exchange import AnswerData, ResponseData, ResponseOptions
from octavo.triton_model.pb_utils import InferenceRequest, ResponseSender
from octavo.triton_model.tensor_values import read_parameters

_INSPECT, _HEALTH = "inspect", "health"

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Health:
    """What the owner of an engine knows of it."""

    engine: str
    """Its state: `ready`, `restarting` or `failed`."""
    is_draining: bool
    """The server stops: live requests are finished, and there will be no others."""
    is_frozen: bool
    """It has said nothing for long, while it was waited for."""
    num_live_requests: int


def read_question(
    request: InferenceRequest, sender: ResponseSender, allow_inspect: bool
) -> LiveInspection | LiveHealth | None:
    """Return what a request asks about the engine; None if it asks for an answer of the model.

    Raises:
        InvalidRequest: it asks for both, or the engine's options do not allow it.
    """
    # Nearly every request ends here, before anything is parsed.
    text = read_parameters(request)
    if _INSPECT not in text and _HEALTH not in text:
        return None
    parameters = read_json_object("parameters", text)
    name = next((each for each in (_INSPECT, _HEALTH) if each in parameters), None)
    if name is None:
        return None
    if name == _INSPECT and not allow_inspect:
        raise InvalidRequest(
            "inspect is not allowed: the engine's option allow_inspect is false; set it to true "
            "in engine.json to show sequences and blocks to every client"
        )
    if parameters[name] is not True and parameters[name] != "true":
        raise refused(name, parameters[name], "true, or absent")
    names = [tensor.name() for tensor in request.inputs()]
    if names:
        raise InvalidRequest(f"{name} takes no tensors but the request has {', '.join(names)}")
    return LiveInspection(sender) if name == _INSPECT else LiveHealth(sender)


class LiveInspection:
    """A question for sequences and blocks, which the writer keeps beside its live requests."""

    options = ResponseOptions()

    def __init__(self, sender: ResponseSender) -> None:
        # The names of requests for tokens are plain numbers.
        self.request = Inspect(f"inspect-{next(_numbers)}")
        self.sender = sender
        self._inspection: Inspection | None = None

    @property
    def request_id(self) -> str:
        """The engine's name for the question."""
        return self.request.request_id

    def take(self, inspection: Inspection) -> None:
        """Keep the engine's answer; a response is due now."""
        self._inspection = inspection

    def pop_response(self) -> ResponseData:
        """Return the answer as the only response."""
        assert self._inspection is not None, "the engine has not answered yet"
        return _whole(self._inspection.to_json())


class LiveHealth:
    """A question for the engine's health; the writer answers it at once."""

    request_id = "health"
    options = ResponseOptions()

    def __init__(self, sender: ResponseSender) -> None:
        self.sender = sender
        self._health: Health | None = None

    def take(self, health: Health) -> None:
        """Keep the answer."""
        self._health = health

    def pop_response(self) -> ResponseData:
        """Return the answer as the only response."""
        assert self._health is not None, "nobody has answered yet"
        return _whole(json.dumps(asdict(self._health)))


def _whole(text: str) -> ResponseData:
    answer = AnswerData(text, finish_reason=FinishReason.STOP)
    return ResponseData((answer,), num_input_tokens=0)
