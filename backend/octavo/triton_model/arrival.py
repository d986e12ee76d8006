"""By which names a request is known outside: its client's, and that of the trace it belongs to.

Read before anything else of it, so that one that is refused has them too. Knows nothing of what it
asks for.
"""

from __future__ import annotations

import contextlib
import json

from octavo.triton_model.exchange import Arrival
from octavo.triton_model.pb_utils import InferenceRequest
from octavo.triton_model.tensor_values import MAX_PARAMETERS_LENGTH

_TRACEPARENT, _TRACESTATE = TRACE_PARAMETERS = ("traceparent", "tracestate")
#: Longer names are cut and longer contexts ignored: both are kept until the request has ended.
MAX_ID_LENGTH = 128
MAX_CONTEXT_LENGTH = 512


def read_arrival(request: InferenceRequest, time_s: float) -> Arrival:
    """Return when and by which names a request came; what cannot be read counts as absent.

    The server's own trace comes first. Without one the parameters `traceparent` and `tracestate`
    count, which a client sends, or the server makes of the headers it is told to forward.
    """
    client_request_id = trace_context = ""
    # What is no UTF-8 becomes an error of the request's parameters, or of nothing.
    with contextlib.suppress(UnicodeDecodeError):
        client_request_id = request.request_id()[:MAX_ID_LENGTH]
    with contextlib.suppress(UnicodeDecodeError):
        trace_context = request.trace().get_context() or _from_parameters(request.parameters())
    return Arrival(time_s, client_request_id, trace_context)


def _from_parameters(text: str) -> str:
    # Nearly every request ends here, before anything is parsed; what is too long is refused later.
    if _TRACEPARENT not in text or len(text) > MAX_PARAMETERS_LENGTH:
        return ""
    parameters = json.loads(text)
    if not isinstance(parameters.get(_TRACEPARENT), str):
        return ""
    given = {name: parameters.get(name) for name in TRACE_PARAMETERS}
    context = {name: value for name, value in given.items() if isinstance(value, str)}
    return json.dumps(context) if sum(map(len, context.values())) <= MAX_CONTEXT_LENGTH else ""
