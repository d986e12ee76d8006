"""Requests and responses as tensors: the only file of the client that knows tensor names.

Knows nothing of connections, threads or event loops.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tritonclient.grpc import service_pb2

from octavo_client.answer import Delta, Timing, TokenLogprob, TokenLogprobs
from octavo_client.errors import InvalidRequest, error_from_message

#: The id of a probe's request, by which the server's log and spans tell it from the others.
PROBE_ID = "octavo-health"
_INT32_LIMIT = 2**31
#: Asked for in every request, so that each response fills whole deltas.
_FLAGS_ALWAYS_SET = (
    "exclude_input_in_output",
    "return_token_ids",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_timing",
)
#: Asked for beside, by the parameter that says how much of it there is.
_FLAGS_BY_PARAMETER = {
    "logprobs": ("return_logprobs", "return_cumulative_logprob"),
    "prompt_logprobs": ("return_prompt_logprobs",),
}

#: Chat messages, or an object that has them beside `tools` and what else a template reads.
Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one form of prompt: text, chat messages or token ids."""

    text: str | None = None
    """Used as it is."""
    messages: Messages | None = None
    """A conversation in OpenAI's format; the server renders the chat template."""
    input_ids: Sequence[int] | None = None
    """Token ids, each in [0, 2**31)."""

    def __post_init__(self) -> None:
        forms = {"prompt": self.text, "messages": self.messages, "input_ids": self.input_ids}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"a request needs exactly one of prompt, messages and input_ids but has {found}"
            )


def encode_request(model: str, prompt: Prompt, stream: bool, params: Mapping[str, Any]) -> Any:
    """Build the `ModelInferRequest` of one request; a parameter of None counts as absent.

    Raises:
        InvalidRequest: a value cannot be sent at all. The server checks everything else.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    given = {key: value for key, value in params.items() if value is not None}
    try:
        _add_prompt(request, prompt)
        _add_string(request, "sampling_parameters", _to_json("sampling parameters", given))
    except (AttributeError, RecursionError, TypeError) as error:
        raise InvalidRequest(
            "a prompt must be a str, messages a list of dicts or a dict, input_ids a sequence of "
            f"int, and parameters plain JSON values: {error}"
        ) from None
    _add_flag(request, "stream", stream)
    asked = (flags for key, flags in _FLAGS_BY_PARAMETER.items() if key in given)
    for name in itertools.chain(_FLAGS_ALWAYS_SET, *asked):
        _add_flag(request, name, True)
    return request


def encode_probe(model: str) -> Any:
    """Build the `ModelInferRequest` that proves by one token that the model works."""
    request = encode_request(model, Prompt("ok"), False, {"max_tokens": 1, "temperature": 0.0})
    request.id = PROBE_ID
    return request


def encode_inspection(model: str) -> Any:
    """Build the `ModelInferRequest` that asks for the engine's state, as JSON in `text_output`."""
    return _encode_question(model, "inspect")


def encode_health(model: str) -> Any:
    """Build the `ModelInferRequest` that asks how the engine is, as JSON in `text_output`."""
    return _encode_question(model, "health")


def _encode_question(model: str, parameter: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters[parameter].bool_param = True
    return request


class ResponseReader:
    """Turns the responses of one request into deltas, each of one answer."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def read(self, response: Any) -> tuple[list[Delta], bool]:
        """Read one `ModelStreamInferResponse`; the flag says whether it is the request's last.

        Answers that it adds nothing to have no delta, but there is always at least one.

        Raises:
            OctavoClientError: the response is an error without a gRPC status.
        """
        if response.error_message:
            raise error_from_message(response.error_message)
        answer = response.infer_response
        names = (output.name for output in answer.outputs)
        raw = dict(zip(names, answer.raw_output_contents, strict=True))
        every = _read_deltas(raw)
        news = [delta for delta in every if delta.index not in self._ended]
        news = [each for each in news if each.text or each.token_ids or each.finish_reason]
        self._ended |= {delta.index for delta in news if delta.finish_reason}
        *others, last = news or every[:1]
        deltas = [*others, replace(last, timing=_read_timing(raw.get("timing", b"")))]
        for scored in _read_logprobs(raw.get("prompt_logprobs", b"")):
            deltas[0] = replace(deltas[0], prompt_logprobs=scored)
        return deltas, answer.parameters["triton_final_response"].bool_param


def _read_deltas(raw: Mapping[str, bytes]) -> list[Delta]:
    """Return a delta for each answer."""
    texts = _read_strings(raw.get("text_output", b"")) or [""]
    reasons = _read_strings(raw.get("finish_reason", b"")) or [""] * len(texts)
    counts = _read_ints(raw.get("num_output_tokens", b"")) or (0,) * len(texts)
    ends = list(itertools.accumulate(counts, initial=0))
    token_ids = _read_ints(raw.get("token_ids", b""))
    num_input_tokens = sum(_read_ints(raw.get("num_input_tokens", b"")))
    logprobs = _read_logprobs(raw.get("logprobs", b"")) or [()] * len(texts)
    sums = _read_floats(raw.get("cumulative_logprob", b"")) or (None,) * len(texts)
    return [
        Delta(
            text,
            token_ids[ends[index] : ends[index + 1]],
            reasons[index] or None,
            num_input_tokens,
            counts[index],
            index,
            logprobs=logprobs[index],
            cumulative_logprob=sums[index],
        )
        for index, text in enumerate(texts)
    ]


def _read_logprobs(raw: bytes) -> list[tuple[Any, ...]]:
    """Return what each JSON list says of places; null is None."""
    return [tuple(map(_read_place, json.loads(text))) for text in _read_strings(raw)]


def _read_place(place: Mapping[str, Any] | None) -> TokenLogprobs | None:
    if place is None:
        return None
    return tuple(
        TokenLogprob(int(token_id), each["logprob"], each["rank"], each["decoded_token"])
        for token_id, each in place.items()
    )


def _read_timing(raw: bytes) -> Timing | None:
    strings = _read_strings(raw)
    if not strings:
        return None
    values = json.loads(strings[0])
    return Timing(**{field.name: values[field.name] for field in fields(Timing)})


def _add_prompt(request: Any, prompt: Prompt) -> None:
    if prompt.text is not None:
        _add_string(request, "text_input", prompt.text)
    elif prompt.messages is not None:
        given = prompt.messages
        value = dict(given) if isinstance(given, Mapping) else list(given)
        _add_string(request, "messages", _to_json("messages", value))
    elif prompt.input_ids is not None:
        _add_token_ids(request, "input_ids", prompt.input_ids)


def _add_string(request: Any, name: str, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode: {error}") from None
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(data)


def _add_flag(request: Any, name: str, value: bool) -> None:
    tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(value)


def _add_token_ids(request: Any, name: str, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < _INT32_LIMIT:
            raise InvalidRequest(f"{name} holds {token_id} but token ids lie in [0, 2**31)")
    tensor = request.inputs.add(name=name, datatype="INT32", shape=[len(token_ids)])
    tensor.contents.int_contents.extend(token_ids)


def _to_json(what: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None


def _read_strings(raw: bytes) -> list[str]:
    # A string tensor is, for each element, a four-byte length and that many bytes.
    strings = []
    start = 0
    while start < len(raw):
        (length,) = struct.unpack_from("<I", raw, start)
        strings.append(raw[start + 4 : start + 4 + length].decode())
        start += 4 + length
    return strings


def _read_ints(raw: bytes) -> tuple[int, ...]:
    # Ids and counts are never negative, so INT32 and UINT32 read alike.
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def _read_floats(raw: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(raw) // 4}f", raw)
