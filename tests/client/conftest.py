"""A scripted Triton server in this process, a relay that can break its connection, clients."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from octavo_client import Client

PATIENCE_S = 10.0

#: What the fake server says of every request's time.
TIMING = (
    '{"queue_ms": 1.5, "prefill_ms": 2.0, "decode_ms": 3.0, "preempted_ms": 0.0, '
    '"cached_tokens": 0, "preemptions": 0}'
)

Step = Any
AnswerPart = tuple[str, str, tuple[int, ...]]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Plays the same steps to every request and records what it was sent."""

    TIMING = TIMING
    HANG = object()
    """A step that waits until the client cancels."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.peers: set[str] = set()
        self.metadata: dict[str, str] = {}
        self.ready = True
        self.script: Callable[[dict[str, Any]], Iterable[Step]] = lambda _: (self.last("ok"),)
        self._cancelled: queue.Queue[dict[str, Any]] = queue.Queue()
        self._threads = ThreadPoolExecutor(max_workers=80)
        self._server = grpc.server(self._threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"127.0.0.1:{self.port}"
        self._server.start()

    def plays(self, *steps: Step) -> None:
        """Answer every request with `steps`."""
        self.script = lambda _: steps

    def delta(self, text: str, *token_ids: int, **values: Any) -> Any:
        """Make a response with more to come."""
        return self.response(text, token_ids, final=False, **values)

    def last(
        self, text: str, *token_ids: int, finish_reason: str = "stop", timing: str = TIMING
    ) -> Any:
        """Make the last response."""
        return self.response(
            text, token_ids, final=True, finish_reason=finish_reason, timing=timing
        )

    def response(self, text: str, token_ids: Iterable[int], *, final: bool, **values: str) -> Any:
        """Make a response of one answer as the server packs it."""
        answer = (text, values.pop("finish_reason", ""), tuple(token_ids))
        return self.answers(answer, final=final, **values)

    def answers(
        self, *answers: AnswerPart, final: bool, timing: str = "", **more: list[Any]
    ) -> Any:
        """Make a response that says of each answer its text, finish reason and token ids.

        `more` are other outputs, of strings or of floats.
        """
        ids = [token_id for _, _, token_ids in answers for token_id in token_ids]
        response = service_pb2.ModelStreamInferResponse()
        answer = response.infer_response
        answer.parameters["triton_final_response"].bool_param = final
        counts = [len(token_ids) for _, _, token_ids in answers]
        for name, kind, data in (
            ("text_output", "BYTES", b"".join(_string(text) for text, _, _ in answers)),
            ("finish_reason", "BYTES", b"".join(_string(reason) for _, reason, _ in answers)),
            ("token_ids", "INT32", struct.pack(f"<{len(ids)}i", *ids)),
            ("num_input_tokens", "UINT32", struct.pack("<I", 7)),
            ("num_output_tokens", "UINT32", struct.pack(f"<{len(counts)}I", *counts)),
            *([("timing", "BYTES", _string(timing))] if timing else []),
        ):
            answer.outputs.add(name=name, datatype=kind)
            answer.raw_output_contents.append(data)
        for name, values in more.items():
            is_text = isinstance(values[0], str)
            answer.outputs.add(name=name, datatype="BYTES" if is_text else "FP32")
            packed = map(_string, values) if is_text else (struct.pack("<f", x) for x in values)
            answer.raw_output_contents.append(b"".join(packed))
        return response

    def fail(self, status: str, message: str) -> Any:
        """Make a step that ends the call with a status."""
        return grpc.StatusCode[status], message

    def refuse(self, message: str) -> Any:
        """Make an error response without a status."""
        return service_pb2.ModelStreamInferResponse(error_message=message)

    def wait_cancelled(self) -> dict[str, Any]:
        """Return the next request whose client has cancelled it."""
        return self._cancelled.get(timeout=PATIENCE_S)

    def stop(self) -> None:
        """Drop every call and stop listening."""
        self._server.stop(0).wait()
        self._threads.shutdown()

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready and request.name == "octavo")

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        request = _values(next(request_iterator))
        call = _Call(request, self._cancelled)
        context.add_callback(call.end)
        self.peers.add(context.peer())
        self.metadata = dict(context.invocation_metadata())
        self.requests.append(request)
        for step in self.script(request):
            if step is self.HANG:
                assert call.ended.wait(PATIENCE_S)
                return
            if isinstance(step, tuple):
                call.answered = True
                context.abort(*step)
            yield step
        call.answered = True


class _Call:
    def __init__(self, request: dict[str, Any], cancelled: queue.Queue[dict[str, Any]]) -> None:
        self.ended = threading.Event()
        self.answered = False
        self._request = request
        self._cancelled = cancelled

    def end(self) -> None:
        if not self.answered:
            self._cancelled.put(self._request)
        self.ended.set()


class Relay:
    """Forwards bytes to the server until it is told to fail like a broken machine."""

    def __init__(self, target_port: int, port: int = 0) -> None:
        self._target = ("127.0.0.1", target_port)
        self._frozen = False
        self._pipes: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def cut(self) -> None:
        """Reset all connections and accept no more, as the kernel does for a killed process."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._acceptor.join()
        self._listener.close()
        while self._pipes:
            near, far = self._pipes.pop()
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for end in (near, far):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def freeze(self) -> None:
        """Swallow all bytes but keep the connections, as a machine without power does."""
        self._frozen = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._pipes.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._frozen:
                    sink.sendall(data)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _values(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"model": request.model_name}
    for tensor in request.inputs:
        contents = tensor.contents
        (field, values), *_ = contents.ListFields()
        found[tensor.name] = list(values) if field.name == "int_contents" else values[0]
    return found


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def relay(server: FakeServer) -> Iterator[Relay]:
    relay = Relay(server.port)
    yield relay
    relay.cut()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture
def free_url() -> str:
    """Return an address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
