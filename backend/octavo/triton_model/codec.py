"""Requests and responses as Triton tensors: the only file that touches tensor names.

Knows nothing of threads, of the engine or of where text comes from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidRequest, code_of
from octavo.request import SequenceTiming
from octavo.request_keys import check_range, read_json, read_json_object, read_value
from octavo.sampling_params import SamplingParams
from octavo.scheduling_params import SCHEDULING_KEYS, SchedulingParams
from octavo.triton_model.arrival import TRACE_PARAMETERS
from octavo.triton_model.exchange import DecodedRequest, ResponseData, ResponseOptions
from octavo.triton_model.pb_utils import AutoCompleteConfig, InferenceRequest, PbUtils
from octavo.triton_model.tensor_values import (
    check_parameters,
    check_prompt_bytes,
    read_flag,
    read_parameters,
    read_string,
    read_token_ids,
)

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
    "return_prompt_logprobs": "prompt_logprobs",
}
#: Parameters that belong to the protocol; servers and clients may leave them in a request.
_PROTOCOL_PARAMETERS = (
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "headers",
    "binary_data_output",
    *TRACE_PARAMETERS,
)
_PROTOCOL_PREFIX = "triton_"
_MAX_TIMEOUT_US = 2**63 - 1
MAX_ERROR_LENGTH = 2000


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
    TensorSpec("prompt_logprobs", "TYPE_STRING", (1,)),
)


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


def decode_request(
    request: InferenceRequest, vocab_size: int, max_prompt_bytes: int
) -> DecodedRequest:
    """Copy a request out of its tensors and parameters.

    Raises:
        InvalidRequest: names the tensor or key, the value given and what is allowed.
        PromptTooLong: the prompt has more bytes than are read.
    """
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    given = [name for name in _PROMPTS if name in tensors]
    if len(given) != 1:
        found = " and ".join(given) or "no prompt"
        raise InvalidRequest(f"the request has {found} but must have one of {', '.join(_PROMPTS)}")
    params, scheduling = _read_params(tensors, request)
    decoded = functools.partial(DecodedRequest, params, scheduling, _read_options(tensors))
    name, array = given[0], tensors[given[0]]
    check_prompt_bytes(name, array, max_prompt_bytes)
    if name == "input_ids":
        token_ids = read_token_ids(name, array, vocab_size)
        return decoded(token_ids=token_ids, prompt_length=len(token_ids))
    text = read_string(name, array)
    if not text:
        raise InvalidRequest(f"{name} is empty but must have at least one character")
    if name == "messages":
        return decoded(messages=read_json(name, text), prompt_length=len(text))
    return decoded(text=text, prompt_length=len(text))


def encode_response(pb_utils: PbUtils, data: ResponseData, outputs: frozenset[str]) -> Any:
    """Build the response that carries `data`: its texts, and what `outputs` names.

    Each output has an element for each answer; token ids follow each other in the order of answers,
    and `num_output_tokens` says how many are whose.
    """
    answers = data.answers
    arrays: dict[str, npt.NDArray[Any]] = {
        "text_output": _strings(answer.text for answer in answers)
    }
    if "finish_reason" in outputs:
        reasons = (answer.finish_reason for answer in answers)
        arrays["finish_reason"] = _strings(reason.value if reason else "" for reason in reasons)
    if "cumulative_logprob" in outputs:
        sums = [answer.cumulative_logprob for answer in answers]
        arrays["cumulative_logprob"] = np.array(sums, np.float32)
    if "logprobs" in outputs:
        arrays["logprobs"] = _strings(_json_list(answer.logprobs) for answer in answers)
    if "token_ids" in outputs:
        token_ids = chain.from_iterable(answer.token_ids for answer in answers)
        arrays["token_ids"] = np.fromiter(token_ids, np.int32)
    if "num_input_tokens" in outputs:
        arrays["num_input_tokens"] = np.array([data.num_input_tokens], np.uint32)
    if "num_output_tokens" in outputs:
        counts = [len(answer.token_ids) for answer in answers]
        arrays["num_output_tokens"] = np.array(counts, np.uint32)
    if data.prompt_logprobs is not None:
        arrays["prompt_logprobs"] = _strings([_json_list(data.prompt_logprobs)])
    if data.timing is not None:
        arrays["timing"] = _strings([_timing_json(data.timing)])
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, array) for name, array in arrays.items()]
    )


def encode_error(pb_utils: PbUtils, error: BaseException) -> Any:
    """Build the response that tells of `error`: its code, and a message that opens with it.

    A gRPC stream passes on the message alone, so the message must name the code.
    """
    code = code_of(error)
    # A message may quote a client's lone surrogates, which no response can carry.
    message = f"{code}: {error}"[:MAX_ERROR_LENGTH].encode(errors="replace").decode()
    return pb_utils.InferenceResponse(
        output_tensors=[],
        error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)),
    )


def _properties(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _read_params(
    tensors: Mapping[str, npt.NDArray[Any]], request: InferenceRequest
) -> tuple[SamplingParams, SchedulingParams]:
    own = {
        key: value
        for key, value in json.loads(read_parameters(request) or "{}").items()
        if key not in _PROTOCOL_PARAMETERS and not key.startswith(_PROTOCOL_PREFIX)
    }
    timeouts_us = [request.timeout(), _read_timeout(own.pop("timeout", None))]
    keys = own
    if "sampling_parameters" in tensors:
        name = "sampling_parameters"
        text = read_string(name, tensors[name])
        in_tensor = read_json_object(name, check_parameters(name, text))
        # The tensor may hold them too, and is the closer to the request's author.
        beside = {key for key in SCHEDULING_KEYS if in_tensor.get(key) is None} & own.keys()
        keys = in_tensor | {key: own[key] for key in beside}
    scheduling = SchedulingParams.from_mapping(keys)
    for timeout_us in filter(None, timeouts_us):
        scheduling = scheduling.at_the_latest(timeout_us / 1000.0)
    return SamplingParams.from_mapping(keys), scheduling


def _read_timeout(value: Any) -> int:
    """Return the protocol's timeout in microseconds, which is a plain parameter over HTTP."""
    timeout_us = read_value("timeout", "int", 0 if value is None else value)
    assert isinstance(timeout_us, int)
    allowed = f"microseconds from 0 (none) to {_MAX_TIMEOUT_US:,}"
    check_range("timeout", timeout_us, 0, _MAX_TIMEOUT_US, allowed)
    return timeout_us


def _read_options(tensors: Mapping[str, npt.NDArray[Any]]) -> ResponseOptions:
    flags = {name: read_flag(name, tensors, False) for name in ("stream", *_FLAGS)}
    return ResponseOptions(
        stream=flags["stream"],
        include_prompt=not read_flag("exclude_input_in_output", tensors, flags["stream"]),
        outputs=frozenset(output for flag, output in _FLAGS.items() if flags[flag]),
    )


def _strings(texts: Iterable[str]) -> npt.NDArray[np.object_]:
    return np.array([text.encode() for text in texts], np.object_)


def _json_list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _timing_json(timing: SequenceTiming) -> str:
    seconds = {
        "queue_ms": timing.queue_s,
        "prefill_ms": timing.prefill_s,
        "decode_ms": timing.decode_s,
        "preempted_ms": timing.preempted_s,
    }
    return json.dumps(
        {name: round(value * 1000.0, 3) for name, value in seconds.items()}
        | {"cached_tokens": timing.num_cached_tokens, "preemptions": timing.num_preemptions}
    )
