"""Random requests, as Hypothesis draws them.

Tensors are of right and wrong types, shapes and bytes, parameters are nearly right, prompts are
missing, doubled or no text at all. Forms are drawn from a few, for each new one is first tried in a
process of its own. Nothing here knows what the right answer is.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

Drawn = st.SearchStrategy[Any]
Content = st.SearchStrategy[tuple[str, list[int], bytes]]
"""Type, shape and bytes of a tensor."""

NUM_GRPC_AT_A_TIME, NUM_HTTP_AT_A_TIME = 5, 3


def seldom(usual: Drawn, other: Drawn) -> Drawn:
    """Draw `other` once in twelve times."""
    return st.sampled_from([usual] * 11 + [other]).flatmap(lambda chosen: chosen)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 2**31, 2**63, -(2**63) - 1, 10**400])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=5,
)
IDS = st.integers(0, 49_151)
FORMS = [{"choice": ["a", "b"]}, {"regex": "[ab]{1,3}"}, {"json_object": True}, {"regex": "("}]
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "beam_width": st.integers(1, 3),
    "length_penalty": st.floats(0, 2),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 50),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(IDS, min_size=1, max_size=3),
    "bad_words": st.lists(TEXT, max_size=2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "min_tokens": st.integers(0, 4),
    "stop": TEXT | st.lists(TEXT, max_size=2),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 3),
    "structured_outputs": st.sampled_from(FORMS),
    "priority": st.integers(-5, 5),
    "deadline_ms": st.floats(1, 1e6),
    "tenant": TEXT,
    "cache_salt": TEXT,
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
}
FLAGS = """stream exclude_input_in_output return_finish_reason return_cumulative_logprob
    return_logprobs return_num_input_tokens return_num_output_tokens return_token_ids return_timing
    return_prompt_logprobs""".split()


@st.composite
def sampling_keys(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a few keys with values that are mostly right, numbers at times as strings."""
    keys: dict[str, Any] = {"max_tokens": draw(seldom(st.integers(1, 6), ANY_JSON))}
    for key in draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=3, unique=True)):
        value = draw(seldom(SAMPLING[key], ANY_JSON))
        is_number = isinstance(value, int | float) and abs(value) < 1e100
        keys[key] = str(value) if is_number and draw(st.booleans()) else value
    return keys | draw(seldom(st.just({}), st.dictionaries(ANY_TEXT, ANY_JSON, max_size=2)))


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@st.composite
def spoilt(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """Draw a text, and at times lose a byte of it or put others there."""
    text = draw(texts)
    wrong = draw(seldom(st.none(), st.sampled_from([b"", b"\0", b"\xff", b"[" * 3000])))
    if wrong is None:
        return text
    at = draw(st.integers(0, len(text)))
    return text[:at] + wrong + text[at + 1 :]


MESSAGE = st.fixed_dictionaries(
    {
        "role": seldom(st.sampled_from(["user", "system"]), ANY_JSON),
        "content": seldom(TEXT, ANY_JSON),
    },
    optional=dict.fromkeys(["name"], TEXT),
)
MESSAGES = seldom(st.lists(MESSAGE, min_size=1, max_size=3), ANY_JSON)


def strings(texts: st.SearchStrategy[bytes]) -> Content:
    return spoilt(texts).map(lambda text: ("BYTES", [1], struct.pack("<I", len(text)) + text))


CONTENTS: dict[str, Content] = {
    "text_input": strings(seldom(TEXT, ANY_TEXT).map(as_bytes)),
    "messages": strings(MESSAGES.map(json.dumps).map(as_bytes)),
    "input_ids": st.lists(seldom(IDS, st.integers(-(2**31), 2**31 - 1)), min_size=1).map(
        lambda ids: ("INT32", [len(ids)], struct.pack(f"<{len(ids)}i", *ids))
    ),
    "sampling_parameters": strings(seldom(sampling_keys(), ANY_JSON).map(json.dumps).map(as_bytes)),
    **dict.fromkeys(FLAGS, st.booleans().map(lambda flag: ("BOOL", [1], bytes([flag])))),
}
ANYTHING: Content = st.tuples(
    st.sampled_from("BOOL INT32 INT64 UINT8 FP16 FP32 FP64 BYTES NONESUCH".split()),
    st.lists(st.sampled_from([-1, 0, 1, 2, 2**31, 2**62]), max_size=3),
    st.binary(max_size=16),
)
PARAMETERS = st.dictionaries(
    TEXT | st.sampled_from([*SAMPLING, "timeout", "sequence_id", "sequence_end", "triton_x"]),
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT,
    max_size=2,
)
PROMPTS = st.sampled_from(["text_input", "input_ids", "messages"])


@st.composite
def grpc_requests(draw: st.DrawFn) -> Any:
    """Draw a request with mostly one prompt; its id is the sender's to set."""
    request = service_pb2.ModelInferRequest(model_name="octavo")
    names = draw(seldom(PROMPTS.map(lambda name: [name]), st.lists(PROMPTS, max_size=3)))
    names += draw(seldom(st.just(["sampling_parameters"]), st.just([])))
    names += draw(st.lists(st.sampled_from(FLAGS), max_size=4, unique=True))
    contents = [(name, draw(seldom(CONTENTS[name], ANYTHING))) for name in names]
    contents += draw(seldom(st.just([]), st.lists(st.tuples(TEXT, ANYTHING), max_size=1)))
    for name, (kind, shape, data) in contents:
        request.inputs.add(name=name, datatype=kind, shape=shape)
        request.raw_input_contents.append(data)
    for key, value in draw(seldom(st.just({}), PARAMETERS)).items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param"}
        setattr(request.parameters[key], kinds.get(type(value), "string_param"), value)
    for name in draw(seldom(st.just([]), st.lists(TEXT, max_size=2))):
        request.outputs.add(name=name)
    return request


@st.composite
def http_bodies(draw: st.DrawFn) -> bytes:
    """Draw JSON whose parameters stand in it, in an object of their own, or in a string."""
    name = draw(PROMPTS)
    prompts = {"text_input": TEXT, "input_ids": st.lists(IDS, min_size=1), "messages": MESSAGES}
    prompt = draw(seldom(prompts[name], ANY_JSON))
    keys = draw(sampling_keys())
    body = draw(
        st.sampled_from(
            [keys, {"parameters": keys}, {"sampling_parameters": json.dumps(keys)}],
        )
    )
    body = {name: json.dumps(prompt) if name == "messages" else prompt, **body}
    body |= draw(st.dictionaries(st.sampled_from(FLAGS), seldom(st.booleans(), ANY_JSON)))
    body |= draw(seldom(st.just({}), st.dictionaries(ANY_TEXT, ANY_JSON, max_size=2)))
    return as_bytes(json.dumps(body, ensure_ascii=draw(st.booleans())))


HTTP_REQUESTS = st.tuples(
    st.sampled_from(["generate", "generate_stream"]),
    spoilt(seldom(http_bodies(), ANY_JSON.map(json.dumps).map(as_bytes))),
)


@pytest.fixture(scope="session")
def requests_at_a_time() -> Drawn:
    """Return a strategy that draws gRPC requests, and pairs of HTTP endpoint and body."""
    grpc, http = NUM_GRPC_AT_A_TIME, NUM_HTTP_AT_A_TIME
    return st.tuples(
        st.lists(grpc_requests(), min_size=grpc, max_size=grpc),
        st.lists(HTTP_REQUESTS, min_size=http, max_size=http),
    )
