"""What a real server tells its operator of requests: lines of the log, and spans in a trace."""

from __future__ import annotations

import gzip
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tritonclient.utils import InferenceServerException

from octavo.local import triton_server
from octavo.local.server_log import LogRecord, parse_line
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

CANARY = "canary-7531"
TRACE = "0af7651916cd43dd8448eb211c80319c"
#: What no error may show a client: a stack, a path, an address, a name of the language.
SECRETS = re.compile(r'Traceback|File "|\.py\b|site-packages|/tmp/|/home/|/root/|0x[0-9a-f]{8}')

OpenExchange = Callable[[TritonServer], Any]
Become = Callable[[Callable[[], bool]], bool]


class Receiver(ThreadingHTTPServer):
    """Receives spans as a collector does: ours as Protobuf, Triton's as JSON."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def ours(self) -> list[Any]:
        """Return the spans that came as Protobuf."""
        spans = []
        for kind, body in list(self.bodies):
            if kind == "application/x-protobuf":
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        spans += scope.spans
        return spans

    def tritons(self) -> dict[str, str]:
        """Return the names of the spans that came as JSON, by their ids."""
        return {
            span["spanId"]: span["name"]
            for kind, body in list(self.bodies)
            if kind == "application/json"
            for resource in json.loads(body)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        }


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.append((self.headers["Content-Type"], body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Return a receiver of spans that runs for this module."""
    with Receiver() as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.shutdown()


@pytest.fixture(scope="module")
def raw_lines() -> Iterator[list[str]]:
    """Return the lines of a server's log as they came, from when the module's server starts."""
    lines: list[str] = []

    def parse(line: str) -> LogRecord:
        lines.append(line)
        return parse_line(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_server, "parse_line", parse)
        yield lines


@pytest.fixture(scope="module")
def observed_server(
    tiny_checkpoint: Path, receiver: Receiver, raw_lines: list[str]
) -> Iterator[TritonServer]:
    """Return a server that logs JSON and, like its model, sends spans to the receiver."""
    environment = {
        "OCTAVO_CPU_THREADS": "1",
        "OCTAVO_NUM_KV_BLOCKS": "8192",
        "OCTAVO_LOG_FORMAT": "json",
        "OCTAVO_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    trace = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS")
    trace += (f"opentelemetry,url={receiver.url}", "opentelemetry,bsp_schedule_delay=100")
    options = ServerOptions(
        model=str(tiny_checkpoint),
        device="cpu",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment=environment,
        flags=tuple(f"--trace-config={setting}" for setting in trace),
    )
    server = TritonServer(options)
    try:
        server.start()
        server.wait_ready(120.0)
        yield server
    finally:
        server.kill()


def _sampling(**keys: Any) -> str:
    return json.dumps({"max_tokens": 2, **keys})


def test_a_requests_span_hangs_below_tritons_and_both_in_the_clients_trace(
    observed_server: TritonServer, receiver: Receiver, become: Become
) -> None:
    request = urllib.request.Request(
        f"{observed_server.http_url}/v2/models/octavo/generate",
        data=b'{"text_input": "one two", "max_tokens": 3, "ignore_eos": true}',
        headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )
    urllib.request.urlopen(request, timeout=60.0).close()
    found: list[Any] = []

    def came() -> bool:
        found[:] = [s for s in receiver.ours() if s.name == "octavo.request"]
        return bool(found) and found[0].parent_span_id.hex() in receiver.tritons()

    assert become(came)
    assert found[0].trace_id.hex() == TRACE
    assert receiver.tritons()[found[0].parent_span_id.hex()] == "octavo"
    attributes = {pair.key: pair.value for pair in found[0].attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    phases = {s.name for s in receiver.ours() if s.parent_span_id == found[0].span_id}
    assert phases == {"queue", "prefill", "decode"}


def test_every_line_of_our_processes_is_json_and_shown_as_text(
    observed_server: TritonServer, exchange: OpenExchange, raw_lines: list[str], become: Become
) -> None:
    with exchange(observed_server) as stream:
        stream.send(
            {"text_input": "one two", "sampling_parameters": _sampling(ignore_eos=True)},
            request_id="mine",
        )
        stream.receive_all()
    ending = (
        r"request \d+ \(mine\): length, \d+( \(\d+ cached\))?\+2 tokens, \d+\.\d\d s, first after"
    )
    assert become(lambda: any(re.match(ending, r.message) for r in observed_server.records))
    ours = [json.loads(line) for line in raw_lines if parse_line(line).ours]
    assert {line["process"] for line in ours} == {"stub", "engine"}
    (mine,) = [line for line in ours if line.get("client_request_id") == "mine"]
    assert (mine["level"], mine["logger"]) == ("INFO", "octavo.triton_model.request_log")
    assert mine["total_ms"] >= mine["first_token_ms"] > 0
    assert re.fullmatch("[0-9a-f]{32}", mine["trace_id"])


WRONG: dict[str, dict[str, Any]] = {
    "not UTF-8": {"text_input": CANARY.encode() + b"\xff"},
    "no JSON": {"sampling_parameters": "{" + CANARY},
    "JSON cut short": {"sampling_parameters": json.dumps({"stop": CANARY})[:-2]},
    "unknown key": {"sampling_parameters": json.dumps({CANARY: 1})},
    "wrong type": {"sampling_parameters": json.dumps({"temperature": CANARY})},
    "wrong stop": {"sampling_parameters": json.dumps({"stop": [CANARY, ""]})},
    "wrong salt": {"sampling_parameters": json.dumps({"cache_salt": [CANARY]})},
    "wrong form": {
        "sampling_parameters": json.dumps({"structured_outputs": {"regex": f"({CANARY}"}})
    },
    "too long": {"text_input": CANARY * 40_000},
    "far too long": {"text_input": CANARY * 1_000_000},
    "messages no JSON": {"messages": CANARY},
    "wrong role": {"messages": json.dumps([{"role": CANARY, "content": CANARY}])},
    "wrong content": {"messages": json.dumps([{"role": "user", "content": {CANARY: 1}}])},
    "too late": {
        "text_input": CANARY * 3000,
        "sampling_parameters": json.dumps({"deadline_ms": 1, "stop": CANARY}),
    },
}


def test_no_word_of_a_request_is_in_log_metrics_or_spans_and_no_error_tells_of_the_inside(
    observed_server: TritonServer,
    exchange: OpenExchange,
    receiver: Receiver,
    raw_lines: list[str],
    find_process: Callable[..., Any],
    become: Become,
) -> None:
    errors: dict[str, str] = {}

    def num_requests_traced() -> int:
        return sum(span.name == "octavo.request" for span in receiver.ours())

    before = num_requests_traced()

    def ask(name: str, **tensors: Any) -> None:
        prompt = {} if "messages" in tensors else {"text_input": CANARY}
        with exchange(observed_server) as stream:
            stream.send(prompt | tensors, request_id=name)
            try:
                stream.receive_all()
            except InferenceServerException as error:
                errors[name] = str(error)

    secrets = {"stop": CANARY, "cache_salt": CANARY, "tenant": CANARY, "bad_words": [CANARY]}
    ask("good", sampling_parameters=_sampling(**secrets))
    for name, tensors in WRONG.items():
        ask(name, **tensors)
    with exchange(observed_server) as stream:
        endless = _sampling(max_tokens=20_000, ignore_eos=True, stop=CANARY)
        tensors = {"text_input": CANARY, "sampling_parameters": endless, "stream": True}
        stream.send(tensors, request_id="killed")
        stream.receive()
        find_process(observed_server, "octavo.engine_process").kill()
        with pytest.raises(InferenceServerException) as killed:
            stream.receive_all()
    errors["killed"] = str(killed.value)
    assert errors.keys() == {*WRONG, "killed"}
    assert {name: text for name, text in errors.items() if SECRETS.search(text)} == {}

    def ends() -> set[str]:
        lines = [json.loads(line) for line in raw_lines if parse_line(line).ours]
        return {line.get("client_request_id", "") for line in lines}

    assert become(lambda: ends() >= {"good", *errors})
    assert become(lambda: num_requests_traced() > before + len(errors))
    assert [line for line in raw_lines if CANARY in line] == []
    with urllib.request.urlopen(observed_server.metrics_url, timeout=10.0) as answer:
        assert CANARY not in answer.read().decode()
    assert [body for _, body in receiver.bodies if CANARY.encode() in body] == []


def test_a_request_is_a_readable_line_of_the_log_unless_told_otherwise(
    tiny_server: TritonServer, exchange: OpenExchange, become: Become
) -> None:
    with exchange(tiny_server) as stream:
        stream.send({"text_input": "one two", "sampling_parameters": "{"}, request_id="a line")
        with pytest.raises(InferenceServerException):
            stream.receive()
    with Client(tiny_server.grpc_url) as client:
        client.health()
    for line in (
        r"INFO    request \(a line\): INVALID_ARG, 0\+0 tokens, \d+\.\d\d s$",
        r"INFO    request \d+ \(octavo-health\): length, 1\+1 tokens, ",
    ):
        assert become(lambda line=line: any(re.search(line, str(r)) for r in tiny_server.records))


def test_a_clients_trace_may_come_as_a_parameter(
    tiny_server: TritonServer, post: Callable[..., tuple[int, str]]
) -> None:
    body = {"text_input": "one", "max_tokens": 1, "traceparent": f"00-{TRACE}-{'b' * 16}-01"}
    assert post(tiny_server, "models/octavo/generate", body)[0] == 200
