import json

import pytest
from tritonclient.grpc import service_pb2

from octavo_client import (
    Answer,
    Completion,
    Delta,
    InvalidRequest,
    ModelNotFound,
    Timing,
    TokenLogprob,
)
from octavo_client.codec import Prompt, ResponseReader, encode_request


def tensors(request):
    return {tensor.name: tensor for tensor in request.inputs}


def test_a_text_prompt_becomes_the_tensors_of_the_contract():
    request = encode_request("octavo", Prompt(text="héllo"), True, {"max_tokens": 3, "seed": None})
    found = tensors(request)
    assert request.model_name == "octavo"
    assert {name: (t.datatype, list(t.shape)) for name, t in found.items()} == {
        "text_input": ("BYTES", [1]),
        "sampling_parameters": ("BYTES", [1]),
        "stream": ("BOOL", [1]),
        "exclude_input_in_output": ("BOOL", [1]),
        "return_token_ids": ("BOOL", [1]),
        "return_finish_reason": ("BOOL", [1]),
        "return_num_input_tokens": ("BOOL", [1]),
        "return_num_output_tokens": ("BOOL", [1]),
        "return_timing": ("BOOL", [1]),
    }
    assert list(found["text_input"].contents.bytes_contents) == ["héllo".encode()]
    parameters = found["sampling_parameters"].contents.bytes_contents[0]
    assert json.loads(parameters) == {"max_tokens": 3}
    flags = {n: t.contents.bool_contents[0] for n, t in found.items() if t.datatype == "BOOL"}
    assert set(flags.values()) == {True}


def test_a_whole_answer_is_asked_for_by_stream_false():
    request = encode_request("octavo", Prompt(text="x"), False, {})
    assert list(tensors(request)["stream"].contents.bool_contents) == [False]


def test_token_ids_are_sent_as_int32():
    tensor = tensors(encode_request("octavo", Prompt(input_ids=[0, 2**31 - 1]), True, {}))[
        "input_ids"
    ]
    assert (tensor.datatype, list(tensor.shape)) == ("INT32", [2])
    assert list(tensor.contents.int_contents) == [0, 2**31 - 1]


MESSAGES = [{"role": "user", "content": "naïve"}]


@pytest.mark.parametrize("messages", [MESSAGES, {"messages": MESSAGES, "tools": []}])
def test_messages_are_sent_as_json(messages):
    tensor = tensors(encode_request("octavo", Prompt(messages=messages), True, {}))["messages"]
    assert json.loads(tensor.contents.bytes_contents[0]) == messages


@pytest.mark.parametrize(
    ("forms", "found"),
    [({}, "none"), ({"text": "x", "input_ids": [1]}, "prompt and input_ids")],
)
def test_a_missing_or_doubled_prompt_is_refused_before_sending(forms, found):
    with pytest.raises(InvalidRequest, match=f"exactly one of .* but has {found}"):
        Prompt(**forms)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (Prompt(text="\ud800"), {}, "text_input is not valid Unicode"),
        (Prompt(input_ids=[1, -1]), {}, "input_ids holds -1"),
        (Prompt(input_ids=[2**31]), {}, "input_ids holds 2147483648"),
        (Prompt(text="x"), {"stop": {1}}, "sampling parameters cannot be written as JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused(prompt, params, message):
    with pytest.raises(InvalidRequest, match=message):
        encode_request("octavo", prompt, True, params)


def read(*responses):
    """Return the deltas of a request's responses, and the last one's flag."""
    reader = ResponseReader()
    read = [reader.read(response) for response in responses]
    return [delta for deltas, _ in read for delta in deltas], read[-1][1]


def test_a_response_becomes_a_delta(server):
    assert read(server.delta("né🙂", 5, 6)) == ([Delta("né🙂", (5, 6), None, 7, 2)], False)


def test_the_final_flag_the_finish_reason_and_the_timing_are_read(server):
    last = server.last("", 9, finish_reason="length")
    timing = Timing(1.5, 2.0, 3.0, 0.0, 0, 0)
    assert read(last) == ([Delta("", (9,), "length", 7, 1, timing=timing)], True)


def test_outputs_that_were_not_sent_are_empty():
    response = service_pb2.ModelStreamInferResponse()
    assert read(response) == ([Delta("", (), None, 0, 0)], False)


def test_each_answer_of_a_response_has_a_delta_of_its_own_tokens(server):
    response = server.answers(("a", "", (1, 2)), ("é", "stop", (3,)), ("", "", (4,)), final=False)
    deltas, _ = read(response)
    assert deltas == [
        Delta("a", (1, 2), None, 7, 2, 0),
        Delta("é", (3,), "stop", 7, 1, 1),
        Delta("", (4,), None, 7, 1, 2),
    ]


def test_answers_without_news_have_no_delta(server):
    deltas, final = read(
        server.answers(("a", "", (1,)), ("b", "stop", (2,)), final=False),
        server.answers(("c", "", (3,)), ("", "stop", ()), final=False),
        server.answers(("", "length", ()), ("", "stop", ()), final=True, timing=server.TIMING),
    )
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (0, "a", None),
        (1, "b", "stop"),
        (0, "c", None),
        (0, "", "length"),
    ]
    assert [delta.timing is None for delta in deltas] == [True, True, True, False]
    assert final


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        ("logprobs", {"return_logprobs", "return_cumulative_logprob"}),
        ("prompt_logprobs", {"return_prompt_logprobs"}),
    ],
)
def test_a_parameter_asks_for_the_outputs_that_it_says_the_size_of(key, flags):
    plain, asked = (
        set(tensors(encode_request("octavo", Prompt(text="a"), True, params)))
        for params in ({key: None}, {key: 0})
    )
    assert asked - plain == flags


def test_log_probabilities_are_read_of_each_answer_and_of_the_prompt(server):
    own, other = TokenLogprob(5, -1.5, 2, " a"), TokenLogprob(9, -0.5, 1, "é")
    place = json.dumps(
        {
            str(each.token_id): {
                "logprob": each.logprob,
                "rank": each.rank,
                "decoded_token": each.token,
            }
            for each in (own, other)
        }
    )
    deltas, _ = read(
        server.answers(
            ("a", "", (5,)),
            ("", "", ()),
            ("b", "", (5, 5)),
            final=False,
            logprobs=[f"[{place}]", "[]", f"[{place}, {place}]"],
            cumulative_logprob=[-1.5, 0.0, -3.0],
            prompt_logprobs=[f"[null, {place}]"],
        ),
        server.answers(
            ("", "stop", ()),
            ("c", "stop", (5,)),
            ("", "stop", ()),
            final=True,
            logprobs=["[]", f"[{place}]", "[]"],
            cumulative_logprob=[-1.5, -1.5, -3.0],
        ),
    )
    completion = Completion.from_deltas(deltas)
    assert [answer.logprobs for answer in completion.answers] == [
        ((own, other),),
        ((own, other),),
        ((own, other), (own, other)),
    ]
    assert [answer.cumulative_logprob for answer in completion.answers] == [-1.5, -1.5, -3.0]
    assert completion.prompt_logprobs == (None, (own, other))
    assert completion.logprobs == completion.answers[0].logprobs
    assert [delta.prompt_logprobs is None for delta in deltas[:2]] == [False, True]


def test_an_error_response_is_raised(server):
    with pytest.raises(ModelNotFound, match="unknown model: 'x'"):
        read(server.refuse("Request for unknown model: 'x' is not found"))


def test_deltas_join_to_a_completion():
    timing = Timing(1.0, 2.0, 3.0, 4.0, 5, 6)
    deltas = [
        Delta("a", (1,), None, 7, 1),
        Delta("", (), None, 7, 0),
        Delta("b", (2, 3), "stop", 7, 2, timing=timing),
    ]
    completion = Completion.from_deltas(deltas)
    assert completion == Completion((Answer("ab", (1, 2, 3), "stop", 3),), 7)
    assert completion.timing == timing


def test_deltas_of_several_answers_join_to_each_and_the_first_stands_by_itself():
    deltas = [
        Delta("a", (1,), None, 7, 1, 0),
        Delta("x", (8,), "length", 7, 1, 1),
        Delta("b", (2,), "stop", 7, 1, 0),
    ]
    completion = Completion.from_deltas(deltas)
    assert completion.answers == (
        Answer("ab", (1, 2), "stop", 2),
        Answer("x", (8,), "length", 1),
    )
    assert (completion.text, completion.token_ids) == ("ab", (1, 2))
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 2)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (Prompt(b"a", None, None), {}),
        (Prompt(None, 5, None), {}),
        (Prompt(None, None, "abc"), {}),
        (Prompt(None, None, [1.5]), {}),
        (Prompt("a", None, None), {"stop": object()}),
    ],
)
def test_values_of_the_wrong_type_are_invalid_requests(prompt, params) -> None:
    with pytest.raises(InvalidRequest):
        encode_request("octavo", prompt, True, params)
