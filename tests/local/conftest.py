"""A trivial model for a real server, and the means to see what a server has left behind."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from octavo.local.guardian import SHARED_MEMORY, processes_of
from octavo.local.server_log import LogRecord
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

OCTAVO = Path(sys.executable).parent / "octavo"

ECHO_CONFIG = """\
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

# Its child moves to a session of its own, as an engine process may.
ECHO_MODEL = """\
import logging
import subprocess

import triton_python_backend_utils as pb_utils

logging.basicConfig(
    level="INFO",
    format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
    datefmt="%H:%M:%S",
)


class TritonPythonModel:
    def initialize(self, args):
        logging.info("echo starts")
        subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            sender = request.get_response_sender()
            output = pb_utils.Tensor("text_output", text)
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(pb_utils.InferenceResponse([output]), final)
"""

# Does to its stub what a busy machine does: no processor time for longer than Triton's second.
# Counts its starts in a file and stalls the first NUM_STALLS of them.
STALLING_MODEL = """\
import logging
import os
import subprocess
import sys
import time

logging.basicConfig(stream=sys.stderr, level="INFO", format="%(asctime)s %(levelname)s %(message)s")


class TritonPythonModel:
    def initialize(self, args):
        starts = os.path.join(args["model_repository"], "starts")
        with open(starts, "a+") as file:
            file.write("x")
            num_starts = file.tell()
        if num_starts <= NUM_STALLS:
            stall = f"kill -STOP {os.getpid()}; sleep 2.5; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", stall])
            time.sleep(2.0)
        logging.info("model ready in 0.5 s")

    def execute(self, requests):
        raise NotImplementedError
"""

BROKEN_MODEL = """\
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("checkpoint /nowhere has no config.json")

    def execute(self, requests):
        raise NotImplementedError
"""

SLOW_MODEL = """\
import time


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(1000)

    def execute(self, requests):
        raise NotImplementedError
"""


def write_repository(folder: Path, name: str, source: str) -> Path:
    """Write a repository with one python model."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(ECHO_CONFIG)
    (version / "model.py").write_text(source)
    return folder


@pytest.fixture(scope="session")
def echo_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("models"), "echo", ECHO_MODEL)


@pytest.fixture(scope="session")
def broken_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("models"), "broken", BROKEN_MODEL)


@pytest.fixture(scope="session")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("models"), "slow", SLOW_MODEL)


@pytest.fixture
def make_stalling_repository(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that makes a model whose first starts make Triton give it up."""

    def make(num_stalls: int) -> Path:
        source = STALLING_MODEL.replace("NUM_STALLS", str(num_stalls))
        return write_repository(tmp_path / "models", "stalling", source)

    return make


@pytest.fixture
def runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that runtime directories of this test are made in."""
    folder = tmp_path / "runtimes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def leftovers() -> Callable[[str], list[str]]:
    """Return a function that lists what still exists of the server with this runtime name."""

    def list_leftovers(name: str) -> list[str]:
        files = [str(path) for path in SHARED_MEMORY.glob(f"{name}*")]
        return [f"process {pid}" for pid in processes_of(name)] + files

    return list_leftovers


@pytest.fixture
def become() -> Callable[[Callable[[], bool]], bool]:
    """Return a function that waits up to 10 s for a condition and says whether it came."""

    def wait(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 10.0
        while not (came := condition()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return came

    return wait


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


@pytest.fixture
def make_server(echo_repository: Path, runtimes: Path) -> Iterator[Callable[..., TritonServer]]:
    """Return a function that makes an echo server on free ports; it is killed after the test."""
    servers: list[TritonServer] = []

    def make(on_log: Callable[[LogRecord], None] | None = None, **options: object) -> TritonServer:
        defaults = {
            "repository": echo_repository,
            "http_port": 0,
            "grpc_port": 0,
            "metrics_port": 0,
            "grace_s": 2.0,
        }
        servers.append(TritonServer(ServerOptions(**{**defaults, **options}), on_log))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def serve(echo_repository: Path, runtimes: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that runs `octavo serve` on free ports; it is killed after the test."""
    launchers: list[subprocess.Popen[str]] = []

    def run(*arguments: str, repository: Path = echo_repository) -> subprocess.Popen[str]:
        ports = "--http-port 0 --grpc-port 0 --metrics-port 0 --grace 5".split()
        command = [str(OCTAVO), "serve", "--repository", str(repository), *ports, *arguments]
        launchers.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return launchers[-1]

    yield run
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


@pytest.fixture
def hold_stream() -> Iterator[Callable[[str], None]]:
    """Return a function that has `echo` answer once on a gRPC stream and leaves it open."""
    clients: list[triton_grpc.InferenceServerClient] = []

    def hold(url: str) -> None:
        clients.append(triton_grpc.InferenceServerClient(url))
        answers: queue.Queue[object] = queue.Queue()
        clients[-1].start_stream(lambda result, error: answers.put(error or result))
        text = triton_grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
        clients[-1].async_stream_infer("echo", [text])
        answer = answers.get(timeout=5.0)
        assert isinstance(answer, triton_grpc.InferResult)
        assert answer.as_numpy("text_output").tolist() == [b"hello"]

    yield hold
    for client in clients:
        client.close()
