"""The client imports nothing of the server, so that the names agree is held here."""

from dataclasses import fields

import pytest

from octavo.sampling_params import SamplingParams
from octavo.scheduling_params import SCHEDULING_KEYS
from octavo.triton_model.codec import INPUTS, OUTPUTS
from octavo_client import AsyncClient, Client
from octavo_client.codec import Prompt, encode_request

TRITON_TYPE = {"BYTES": "TYPE_STRING"}


def type_of(tensor):
    return TRITON_TYPE.get(tensor.datatype, f"TYPE_{tensor.datatype}")


def test_the_server_declares_every_tensor_that_the_client_sends():
    prompts = (Prompt(text="hi"), Prompt(messages=[]), Prompt(input_ids=[1]))
    params = {"logprobs": 1, "prompt_logprobs": 1}
    requests = [encode_request("octavo", prompt, True, params) for prompt in prompts]
    sent = {(tensor.name, type_of(tensor)) for request in requests for tensor in request.inputs}
    assert sent <= {(spec.name, spec.data_type) for spec in INPUTS}


def test_the_server_declares_every_tensor_that_the_client_reads(server):
    outputs = server.delta("hi", 1).infer_response.outputs
    read = {(tensor.name, type_of(tensor)) for tensor in outputs}
    assert read <= {(spec.name, spec.data_type) for spec in OUTPUTS}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_lists_every_parameter_that_the_server_takes(kind):
    sampling = {field.name for field in fields(SamplingParams)}
    for method in (kind.stream, kind.generate):
        assert [
            key for key in (*sampling, *SCHEDULING_KEYS) if f"`{key}`" not in method.__doc__
        ] == []
