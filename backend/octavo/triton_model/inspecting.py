"""A client's question for the engine's state: a request without tensors, answered with JSON.

It is the parameter `inspect`, true. Knows nothing of threads or of what the state says.
"""

from __future__ import annotations

import itertools

from octavo.engine_messages import Inspect
from octavo.errors import InvalidRequest
from octavo.inspection import Inspection
from octavo.request import FinishReason
from octavo.request_keys import read_json_object, refused
from octavo.triton_model.exchange import AnswerData, ResponseData, ResponseOptions
from octavo.triton_model.pb_utils import InferenceRequest, ResponseSender
from octavo.triton_model.tensor_values import read_parameters

_PARAMETER = "inspect"

_numbers = itertools.count()


def asks_to_inspect(request: InferenceRequest, is_allowed: bool) -> bool:
    """Return whether a request asks for the engine's state rather than for an answer.

    Raises:
        InvalidRequest: it asks for both, or the engine's options do not allow it.
    """
    # Nearly every request ends here, before anything is parsed.
    text = read_parameters(request)
    if _PARAMETER not in text:
        return False
    parameters = read_json_object("parameters", text)
    if _PARAMETER not in parameters:
        return False
    if not is_allowed:
        raise InvalidRequest(
            "inspect is not allowed: the engine's option allow_inspect is false; set it to true "
            "in engine.json to show sequences and blocks to every client"
        )
    if parameters[_PARAMETER] is not True and parameters[_PARAMETER] != "true":
        raise refused(_PARAMETER, parameters[_PARAMETER], "true, or absent")
    names = [tensor.name() for tensor in request.inputs()]
    if names:
        raise InvalidRequest(f"inspect takes no tensors but the request has {', '.join(names)}")
    return True


class LiveInspection:
    """Such a question until it is answered; the writer keeps it beside its live requests."""

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
        answer = AnswerData(self._inspection.to_json(), finish_reason=FinishReason.STOP)
        return ResponseData((answer,), num_input_tokens=0)
