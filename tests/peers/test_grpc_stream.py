from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from benchmarks.peers.grpc_stream import play_on_one_stream
from benchmarks.peers.loads import Load
from benchmarks.peers.measure import check
from benchmarks.peers.side import Unavailable
from benchmarks.workload import Job
from tritonclient.grpc import service_pb2, service_pb2_grpc


class PairingServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers two requests at a time in turns: both get two tokens, then both the rest."""

    def __init__(self):
        self.prompts = []
        self.num_streams = 0
        self.error = ""

    def ModelStreamInfer(self, requests, context):
        self.num_streams += 1
        for request in requests:
            if self.error:
                yield service_pb2.ModelStreamInferResponse(error_message=self.error)
                continue
            pair = (request, next(requests))
            yield from (self._tokens(each, 2, is_last=False) for each in pair)
            yield from (self._tokens(each, self._wanted(each) - 2, is_last=True) for each in pair)

    def _wanted(self, request):
        names = (each.name for each in request.inputs)
        raw = dict(zip(names, request.raw_input_contents, strict=True))
        self.prompts.append(list(struct.iter_unpack("<i", raw["input_ids"])))
        return json.loads(raw["sampling_parameters"][4:])["max_tokens"]

    def _tokens(self, request, count, is_last):
        response = service_pb2.ModelStreamInferResponse()
        answer = response.infer_response
        answer.id = request.id
        answer.parameters["triton_final_response"].bool_param = is_last
        answer.outputs.add(name="num_output_tokens", datatype="UINT32", shape=[1])
        answer.raw_output_contents.append(struct.pack("<I", count))
        return response


@pytest.fixture
def server():
    pairing = PairingServer()
    own = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(pairing, own)
    pairing.url = f"127.0.0.1:{own.add_insecure_port('127.0.0.1:0')}"
    own.start()
    yield pairing
    own.stop(0).wait()


def make_load(num_requests, concurrency):
    jobs = tuple(Job([100 + index], 3 + index) for index in range(num_requests))
    return Load(jobs, (0.0,) * num_requests, concurrency)


def test_every_request_goes_over_one_stream_and_gets_its_own_tokens(server):
    load = make_load(6, concurrency=6)
    replies = play_on_one_stream(server.url, load)
    check(load, replies)
    assert server.num_streams == 1
    assert server.prompts == [[(100 + index,)] for index in range(6)]


def test_tokens_of_one_response_came_at_the_same_time(server):
    first, _ = play_on_one_stream(server.url, make_load(2, concurrency=2))
    early, also_early, late = first.token_s
    assert early == also_early
    assert first.sent_s <= early <= late


def test_a_request_waits_for_its_arrival(server):
    load = make_load(2, concurrency=2)
    replies = play_on_one_stream(server.url, Load(load.jobs, (0.0, 0.2), 2))
    assert replies[0].sent_s < 0.2 <= replies[1].sent_s


def test_an_error_ends_the_play_though_others_have_no_answer(server):
    server.error = "UNAVAILABLE: too many wait"
    with pytest.raises(Unavailable, match="too many wait"):
        play_on_one_stream(server.url, make_load(3, concurrency=2))


def test_a_server_that_is_gone_ends_the_play():
    with pytest.raises(Unavailable):
        play_on_one_stream("127.0.0.1:1", make_load(3, concurrency=2))
