"""A thousand random requests by gRPC and HTTP: each ends once, with an answer or a reason.

All go through one stream and a few connections of one server; meanwhile a stream runs whose tokens
must stay those of a quiet server.
"""

from __future__ import annotations

import collections
import http.client
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import given, settings
from tritonclient.grpc import service_pb2_grpc

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
FindProcess = Callable[[TritonServer, str], psutil.Process]

NUM_CASES, NUM_AT_A_TIME = 1000, 8
ANSWER_TIMEOUT_S = 60.0
#: Bounds every answer, whatever `max_tokens` says.
CONTEXT = 512
CANARY: dict[str, Any] = {"input_ids": [5] * 3, "max_tokens": 300, "ignore_eos": True, "seed": 4}

ANSWERED = "answered"
REASONS = {
    "refused by the model": r"(400 )?INVALID_ARG: ",
    "too late": r"(400 )?CANCELLED: the request passed its deadline of",
    "refused by Triton": r"""(?xs)(\[request\ id:.*\]\ |\d+\ )?(
        unexpected\ inference\ (in|out)put\ '
        |input\ '.*'\ already\ exists\ in\ request
        |inference\ input\ '.*'\ data-type\ is
        |All\ input\ dimensions\ should\ be\ specified\ for\ input
        |unexpected\ shape\ for\ input\ '
        |input\ byte\ size\ mismatch
        |unexpected\ total\ byte\ size
        |expected\ \d+\ string\ elements\ for\ inference\ input\ '
        |unexpected\ number\ of\ string\ elements\ \d+\ for\ inference\ input\ '
        |incomplete\ string\ (data|length\ indicator)\ for\ inference\ input\ '
        |parameter\ '.*'\ has\ invalid\ type
        |parameter\ key\ '.*'\ was\ not\ found\ in\ the\ JSON
        |invalid\ value\ (type\ )?for
        |parameter\ keys\ starting\ with\ 'triton_'
        |Converting\ keyword:\ 'parameters'
        |The\ schema\ can\ not\ convert\ input\ '
        |failed\ to\ parse\ the\ request\ JSON\ buffer:
        |Unable\ to\ parse
        |attempt\ to\ get\ members\ for\ non-object
        |generate\ expects\ model\ to\ produce\ exactly\ 1\ response
    )""",
}
#: What no message may show: a stack, or where the server keeps its files.
SECRETS = re.compile(r'Traceback|File "|\.py\b|site-packages|/tmp/|/home/|/root/')


class Wire:
    """One gRPC stream and as many HTTP connections as there are requests at a time."""

    def __init__(self, server: TritonServer) -> None:
        self._address = server.http_url.removeprefix("http://")
        self._idle: list[http.client.HTTPConnection] = []
        self._channel = grpc.insecure_channel(server.grpc_url)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter(self._outbox.get, None))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._num_sent = 0

    def _read(self) -> None:
        try:
            for message in self._call:
                self._inbox.put(message)
        except grpc.RpcError as error:
            self._inbox.put(error)

    def ask(self, grpc_requests: list[Any], http_requests: list[tuple[str, bytes]]) -> list[str]:
        """Send all at once; return how each ended: answered, or the reason why not."""
        ids = []
        for request in grpc_requests:
            self._num_sent += 1
            request.id = f"{self._num_sent} {request.id}"
            ids.append(request.id)
            self._outbox.put(request)
        connections = [self._post(*request) for request in http_requests]
        ends = self._grpc_ends(set(ids))
        return [*(ends[name] for name in ids), *map(self._http_end, connections)]

    def _post(self, endpoint: str, body: bytes) -> http.client.HTTPConnection:
        new = http.client.HTTPConnection(self._address, timeout=ANSWER_TIMEOUT_S)
        connection = self._idle.pop() if self._idle else new
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v2/models/octavo/{endpoint}", body, headers)
        return connection

    def _grpc_ends(self, waiting: set[str]) -> dict[str, str]:
        """Read until each request has had its final response."""
        ends: dict[str, str] = {}
        while waiting:
            message = self._inbox.get(timeout=ANSWER_TIMEOUT_S)
            assert not isinstance(message, grpc.RpcError), f"the stream ended: {message}"
            answer = message.infer_response
            assert answer.id in waiting, f"a response to a request that had ended: {message}"
            if message.error_message or answer.parameters["triton_final_response"].bool_param:
                ends[answer.id] = message.error_message or ANSWERED
                waiting.remove(answer.id)
        return ends

    def _http_end(self, connection: http.client.HTTPConnection) -> str:
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")  # Triton quotes what was sent
        self._idle.append(connection)
        if body.startswith("data: "):
            *_, last, rest = body.split("\n\n")
            assert not rest, f"the last event is cut: {body}"
            body = last.removeprefix("data: ")
        said = json.loads(body)
        if "error" in said:
            return f"{answer.status} {said['error']}"
        assert answer.status == 200
        assert "text_output" in said
        return ANSWERED

    def close(self) -> int:
        """Close everything; return how many messages came of which nobody knew."""
        self._outbox.put(None)
        self._reader.join(ANSWER_TIMEOUT_S)
        self._channel.close()
        for connection in self._idle:
            connection.close()
        return self._inbox.qsize()


@contextmanager
def canary(server: TritonServer) -> Iterator[list[bool]]:
    """Read streams of one request, one after the other; note whether each had the right tokens."""
    client = Client(server.grpc_url, timeout_s=300)
    quiet = client.generate(**CANARY).token_ids
    assert len(quiet) == CANARY["max_tokens"]
    undisturbed: list[bool] = []
    is_over = threading.Event()

    def sing() -> None:
        while not is_over.is_set():
            deltas = client.stream(**CANARY)
            undisturbed.append(tuple(i for delta in deltas for i in delta.token_ids) == quiet)

    thread = threading.Thread(target=sing)
    thread.start()
    try:
        yield undisturbed
    finally:
        is_over.set()
        thread.join()
        client.close()


def kind_of(end: str) -> str:
    """Return what an end counts as, or all of it if it is none of those that may be."""
    assert not SECRETS.search(end)
    return next((kind for kind, pattern in REASONS.items() if re.match(pattern, end)), end)


def test_random_requests_end_once_with_an_answer_or_a_reason(
    start_server: StartServer,
    find_process: FindProcess,
    requests_at_a_time: Any,
    pytestconfig: pytest.Config,
) -> None:
    """The same cases each time, or others with `--hypothesis-seed`."""
    is_seeded = pytestconfig.getoption("--hypothesis-seed") is not None
    server = start_server(environment={"OCTAVO_MAX_MODEL_LEN": str(CONTEXT)})
    processes = [find_process(server, word) for word in ("octavo.engine_process", "backend_stub")]
    wire = Wire(server)
    ends: collections.Counter[str] = collections.Counter()

    @settings(max_examples=NUM_CASES // NUM_AT_A_TIME, derandomize=not is_seeded)
    @given(requests_at_a_time)
    def ask(requests: tuple[list[Any], list[tuple[str, bytes]]]) -> None:
        kinds = collections.Counter(map(kind_of, wire.ask(*requests)))
        assert set(kinds) <= {ANSWERED, *REASONS}
        ends.update(kinds)

    try:
        with canary(server) as undisturbed:
            ask()
    finally:
        num_unknown = wire.close()  # what is left open would be told of in later tests
    assert num_unknown == 0
    assert len(undisturbed) > 1
    assert all(undisturbed)
    assert ends.total() >= NUM_CASES
    assert min(ends[ANSWERED], ends["refused by the model"]) > NUM_CASES // 10
    assert all(process.is_running() for process in processes)
