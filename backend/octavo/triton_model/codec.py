"""Requests and responses as Triton tensors: the only file that touches tensor names.

Knows nothing of threads, of the engine or of where text comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidRequest, code_of
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.triton_model.pb_utils import AutoCompleteConfig, InferenceRequest, PbUtils

_PROMPTS = ("text_input", "input_ids", "messages")
#: Flag to the output it asks for; `text_output` always comes.
_FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_token_ids": "token_ids",
    "return_timing": "timing",
}
#: Flags of the contract that a later version will take; refused rather than ignored.
_UNSUPPORTED_FLAGS = ("return_cumulative_logprob", "return_logprobs", "return_timing")
#: Parameters that belong to the protocol; servers and clients may leave them in a request.
_PROTOCOL_PARAMETERS = (
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "headers",
    "binary_data_output",
)
_PROTOCOL_PREFIX = "triton_"
#: Parameters that are read even beside a `sampling_parameters` tensor.
_SCHEDULING_KEYS = ("priority", "deadline_ms", "tenant", "cache_salt")
_MAX_ERROR_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a tensor, as the model configuration has them."""

    name: str
    data_type: str
    dims: tuple[int, ...]


INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", (1,)),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("messages", "TYPE_STRING", (1,)),
    TensorSpec("stream", "TYPE_BOOL", (1,)),
    TensorSpec("sampling_parameters", "TYPE_STRING", (1,)),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", (1,)),
    *(TensorSpec(name, "TYPE_BOOL", (1,)) for name in _FLAGS),
)
OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", (-1,)),
    TensorSpec("finish_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("logprobs", "TYPE_STRING", (-1,)),
    TensorSpec("token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("num_input_tokens", "TYPE_UINT32", (1,)),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorSpec("timing", "TYPE_STRING", (1,)),
)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client wants its responses to be."""

    stream: bool = False
    """Deltas as they come, rather than one response when all is done."""
    include_prompt: bool = True
    """The prompt stands before the text."""
    outputs: frozenset[str] = frozenset()
    """Names of the outputs to send beside `text_output`."""


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request as its client meant it; exactly one of `text`, `token_ids`, `messages` is set."""

    params: SamplingParams
    options: ResponseOptions
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: Any = None
    """Decoded JSON; whether these are chat messages is not checked here."""
    prompt_length: int = 0
    """Characters of the text or of the JSON, or number of ids: how long reading it may take."""


@dataclass(frozen=True, slots=True)
class ResponseData:
    """The content of one response."""

    text: str
    token_ids: tuple[int, ...]
    num_input_tokens: int
    finish_reason: FinishReason | None
    """None while more will come."""


def complete_config(config: AutoCompleteConfig) -> None:
    """Add to a model configuration what config.pbtxt leaves out.

    Raises:
        ValueError: config.pbtxt says something else of a tensor, the batch size or the policy.
    """
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    given = config.as_dict()
    named = {tensor["name"] for tensor in (*given["input"], *given["output"])}
    for spec in INPUTS:
        # Of an input that config.pbtxt names, being required is the operator's choice.
        optional = {} if spec.name in named else {"optional": True}
        config.add_input({**_properties(spec), **optional})
    for spec in OUTPUTS:
        config.add_output(_properties(spec))


def decode_request(request: InferenceRequest, vocab_size: int) -> DecodedRequest:
    """Copy a request out of its tensors and parameters.

    Raises:
        InvalidRequest: names the tensor or key, the value given and what is allowed.
    """
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    given = [name for name in _PROMPTS if name in tensors]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InvalidRequest(f"the request has {found} but must have one of {', '.join(_PROMPTS)}")
    if request.timeout():
        raise InvalidRequest("the protocol's timeout is not supported yet; send none")
    params = _read_params(tensors, request.parameters())
    options = _read_options(tensors)
    name, array = given[0], tensors[given[0]]
    if name == "input_ids":
        token_ids = _read_token_ids(name, array, vocab_size)
        return DecodedRequest(params, options, token_ids=token_ids, prompt_length=len(token_ids))
    text = _read_string(name, array)
    if not text:
        raise InvalidRequest(f"{name} is empty but must have at least one character")
    if name == "messages":
        messages = _read_json(name, text)
        return DecodedRequest(params, options, messages=messages, prompt_length=len(text))
    return DecodedRequest(params, options, text=text, prompt_length=len(text))


def encode_response(pb_utils: PbUtils, data: ResponseData, outputs: frozenset[str]) -> Any:
    """Build the response that carries `data`: its text, and what `outputs` names."""
    reason = "" if data.finish_reason is None else data.finish_reason.value
    arrays: dict[str, npt.NDArray[Any]] = {"text_output": _strings(data.text)}
    if "finish_reason" in outputs:
        arrays["finish_reason"] = _strings(reason)
    if "token_ids" in outputs:
        arrays["token_ids"] = np.array(data.token_ids, np.int32)
    if "num_input_tokens" in outputs:
        arrays["num_input_tokens"] = np.array([data.num_input_tokens], np.uint32)
    if "num_output_tokens" in outputs:
        arrays["num_output_tokens"] = np.array([len(data.token_ids)], np.uint32)
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, array) for name, array in arrays.items()]
    )


def encode_error(pb_utils: PbUtils, error: BaseException) -> Any:
    """Build the response that tells of `error`: its code, and a message that opens with it.

    A gRPC stream passes on the message alone, so the message must name the code.
    """
    code = code_of(error)
    # A message may quote a client's lone surrogates, which no response can carry.
    message = f"{code}: {error}"[:_MAX_ERROR_LENGTH].encode(errors="replace").decode()
    return pb_utils.InferenceResponse(
        output_tensors=[],
        error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)),
    )


def _properties(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _read_params(tensors: Mapping[str, npt.NDArray[Any]], parameters: str) -> SamplingParams:
    own = {
        key: value
        for key, value in json.loads(parameters or "{}").items()
        if key not in _PROTOCOL_PARAMETERS and not key.startswith(_PROTOCOL_PREFIX)
    }
    if "timeout" in own:
        raise InvalidRequest("the protocol's timeout is not supported yet; send none")
    if "sampling_parameters" not in tensors:
        return SamplingParams.from_mapping(own)
    SamplingParams.from_mapping({key: own[key] for key in _SCHEDULING_KEYS if key in own})
    return SamplingParams.from_json(
        _read_string("sampling_parameters", tensors["sampling_parameters"])
    )


def _read_options(tensors: Mapping[str, npt.NDArray[Any]]) -> ResponseOptions:
    flags = {name: _read_flag(name, tensors, False) for name in ("stream", *_FLAGS)}
    for name in _UNSUPPORTED_FLAGS:
        if flags[name]:
            raise InvalidRequest(f"{name} is not supported yet; leave it out or send false")
    return ResponseOptions(
        stream=flags["stream"],
        include_prompt=not _read_flag("exclude_input_in_output", tensors, flags["stream"]),
        outputs=frozenset(output for flag, output in _FLAGS.items() if flags[flag]),
    )


def _read_flag(name: str, tensors: Mapping[str, npt.NDArray[Any]], default: bool) -> bool:
    return bool(_read_one(name, tensors[name])) if name in tensors else default


def _read_string(name: str, array: npt.NDArray[Any]) -> str:
    value = _read_one(name, array)
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} has byte 0x{error.object[error.start]:02x} at position {error.start:,} "
            "but must be valid UTF-8"
        ) from None


def _read_one(name: str, array: npt.NDArray[Any]) -> Any:
    if array.shape != (1,):
        raise InvalidRequest(f"{name} has shape {list(array.shape)} but must have shape [1]")
    return array[0]


def _read_token_ids(name: str, array: npt.NDArray[Any], vocab_size: int) -> tuple[int, ...]:
    if array.ndim != 1 or not array.size:
        raise InvalidRequest(
            f"{name} has shape {list(array.shape)} but must have shape [n] with n of at least 1"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        raise InvalidRequest(
            f"{name} has {array[wrong[0]]} at position {wrong[0]:,} but token ids are "
            f"0 to {vocab_size - 1}"
        )
    return tuple(array.tolist())


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from None


def _strings(text: str) -> npt.NDArray[np.object_]:
    return np.array([text.encode()], np.object_)
