"""Real servers for the end-to-end tests, and the few ways to talk to them and to look at them."""

from __future__ import annotations

import json
import queue
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from octavo.local.demo_model import demo_checkpoint
from octavo.local.guardian import MARKER, SHARED_MEMORY, processes_of
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

StartServer = Callable[..., TritonServer]
FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
LOAD_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
TINY_CONTEXT = 32_768


@dataclass(frozen=True)
class Response:
    """One response of a request, its outputs as lists, strings decoded."""

    request_id: str
    outputs: dict[str, list[Any]]
    is_final: bool

    @property
    def text(self) -> str:
        (text,) = self.outputs["text_output"]
        return str(text)


class Exchange:
    """One gRPC stream of the stock client; leaving its block cancels.

    Without the header `triton_grpc_error`: this version of the server crashes now and then after
    an error of a stream that carries it.
    """

    def __init__(self, url: str) -> None:
        self._client = triton_grpc.InferenceServerClient(url)
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._answers.put(error or result))

    def send(self, tensors: Mapping[str, Any], *, model: str = "octavo", **options: Any) -> None:
        """Send a request whose tensors are given as plain values or as arrays."""
        inputs = [_to_input(name, value) for name, value in tensors.items()]
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Response:
        """Return the next response, or raise the error that came instead."""
        answer = self._answers.get(timeout=timeout_s)
        if isinstance(answer, InferenceServerException):
            raise answer
        message = answer.get_response()
        names = [output.name for output in message.outputs]
        return Response(
            message.id,
            {name: _to_list(answer.as_numpy(name)) for name in names},
            message.parameters["triton_final_response"].bool_param,
        )

    def receive_all(self) -> list[Response]:
        """Return the responses up to the final one."""
        responses = [self.receive()]
        while not responses[-1].is_final:
            responses.append(self.receive())
        return responses

    def finish(self) -> int:
        """Close our end, wait for the server to close its own; return how much is unread."""
        self._client.stop_stream()
        return self._answers.qsize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        stream = self._client._stream
        self._client.stop_stream(cancel_requests=True)
        if stream is not None:  # the thread that sends would wait for a request for ever
            stream._request_queue.put(None)
        self._client.close()


def _to_input(name: str, value: Any) -> Any:
    if isinstance(value, str | bytes):
        value = np.array([value.encode() if isinstance(value, str) else value], np.object_)
    elif isinstance(value, bool):
        value = np.array([value])
    elif not isinstance(value, np.ndarray):
        value = np.array(value, np.int32)
    tensor = triton_grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    return tensor.set_data_from_numpy(value)


def _to_list(array: Any) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]


@pytest.fixture(scope="session")
def exchange() -> Callable[[TritonServer], Exchange]:
    """Return a function that opens a gRPC stream of the stock client to a server."""
    return lambda server: Exchange(server.grpc_url)


@pytest.fixture(scope="session")
def post() -> Callable[..., tuple[int, str]]:
    """Return a function that posts JSON to a server's path; it gives the status and the body."""

    def send(server: TritonServer, path: str, body: Any) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{server.http_url}/v2/{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return send


@pytest.fixture(scope="session")
def metrics() -> Callable[[TritonServer], dict[str, float]]:
    """Return a function that reads the engine's metrics by name, without the prefix.

    Behind the name stands the value of a label that is neither the model nor its version.
    """

    def read(server: TritonServer) -> dict[str, float]:
        with urllib.request.urlopen(server.metrics_url, timeout=10.0) as answer:
            lines = answer.read().decode()
        found = {}
        for name, labels, value in re.findall(r"^octavo_(\w+)\{(.*)\} (\S+)$", lines, re.M):
            own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            assert (own.pop("model"), own.pop("version")) == ("octavo", "1")
            found[" ".join([name, *own.values()])] = float(value)
        return found

    return read


@pytest.fixture(scope="session")
def become() -> Callable[..., bool]:
    """Return a function that waits, for a bounded time, until a condition holds; it says if so."""

    def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (came := condition()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return came

    return wait


@pytest.fixture(scope="session")
def find_processes() -> Callable[[TritonServer, str], list[psutil.Process]]:
    """Return a function that finds the processes of a server whose commands hold a word."""

    def command(process: psutil.Process) -> str:
        try:
            return " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # it has just ended
            return ""

    def find(server: TritonServer, word: str) -> list[psutil.Process]:
        children = psutil.Process(server.pid).children(recursive=True)
        return [child for child in children if word in command(child)]

    return find


@pytest.fixture(scope="session")
def find_process(
    find_processes: Callable[[TritonServer, str], list[psutil.Process]],
) -> Callable[[TritonServer, str], psutil.Process]:
    """Return a function that finds the only process of a server whose command holds a word."""

    def find(server: TritonServer, word: str) -> psutil.Process:
        (found,) = find_processes(server, word)
        return found

    return find


@pytest.fixture(scope="session")
def find_workers(
    find_processes: Callable[[TritonServer, str], list[psutil.Process]],
) -> Callable[[TritonServer], list[psutil.Process]]:
    """Return a function that finds a server's ranks but the first, in their order."""
    return lambda server: sorted(
        find_processes(server, "octavo.executor.parallel.worker"), key=psutil.Process.create_time
    )


@pytest.fixture(scope="session")
def watch_leftovers() -> Callable[[TritonServer], Callable[[], list[str]]]:
    """Return a function that, for a running server, gives one that lists what is left of it."""

    def watch(server: TritonServer) -> Callable[[], list[str]]:
        name = psutil.Process(server.pid).environ()[MARKER]

        def leftovers() -> list[str]:
            files = [str(path) for path in SHARED_MEMORY.glob(f"{name}*")]
            return [f"process {pid}" for pid in processes_of(name)] + files

        return leftovers

    return watch


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama of two layers with the demo model's tokenizer: it loads in no time."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in demo_checkpoint().glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _started(**options: Any) -> TritonServer:
    """Start a server and wait until it is ready."""
    server = TritonServer(ServerOptions(**{**FREE_PORTS, **options}))
    server.start()
    try:
        server.wait_ready(LOAD_TIMEOUT_S)
    except BaseException:
        server.kill()
        raise
    return server


@contextmanager
def _serving(**options: Any) -> Iterator[TritonServer]:
    server = _started(**options)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[TritonServer]]:
    """Return what starts a server with some options, and kills it at the end of a block."""
    return _serving


@pytest.fixture(scope="session")
def serving_cleanly(
    watch_leftovers: Callable[[TritonServer], Callable[[], list[str]]],
) -> Callable[..., AbstractContextManager[TritonServer]]:
    """Return what starts a server, stops it at the end of a block and sees that nothing is left."""

    @contextmanager
    def serve(**options: Any) -> Iterator[TritonServer]:
        with _serving(**options) as server:
            leftovers = watch_leftovers(server)
            yield server
            server.stop()
            assert leftovers() == []

    return serve


def _started_tiny(checkpoint: Path, **options: Any) -> TritonServer:
    """Start a server of the tiny model, which one thread and 65 MB of KV blocks are enough for."""
    frugal = {"OCTAVO_CPU_THREADS": "1", "OCTAVO_NUM_KV_BLOCKS": "8192"}
    environment = {**frugal, **options.pop("environment", {})}
    return _started(model=str(checkpoint), device="cpu", environment=environment, **options)


@pytest.fixture
def start_server(tiny_checkpoint: Path) -> Iterator[StartServer]:
    """Return a function that starts a server, of the tiny model unless a repository is given.

    It takes `ServerOptions`, uses free ports and waits until the server is ready. The servers are
    killed after the test.
    """
    servers: list[TritonServer] = []

    def start(**options: Any) -> TritonServer:
        by_itself = "repository" in options
        server = _started(**options) if by_itself else _started_tiny(tiny_checkpoint, **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


def _save_demo_adapter(folder: Path) -> None:
    """Write an adapter of the demo model's first layer, strong enough to change what it says."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((demo_checkpoint() / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    shapes = {"lora_A": (1, config["intermediate_size"]), "lora_B": (config["hidden_size"], 1)}
    module = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{module}.{part}.weight": torch.randn(shape, generator=generator)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Return a server of the demo model that all tests share; leave it as you found it.

    It has an adapter, `other words`.
    """
    folder = tmp_path_factory.mktemp("demo-adapter")
    _save_demo_adapter(folder)
    listed = folder / "multi_lora.json"
    listed.write_text(json.dumps({"other words": "."}))
    environment = {
        "OCTAVO_NUM_KV_BLOCKS": "1024",
        "OCTAVO_ENABLE_LORA": "true",
        "OCTAVO_MULTI_LORA": str(listed),
    }
    server = _started(model="demo", device="cpu", environment=environment)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """Return a server of the tiny model that all tests share; leave it as you found it."""
    server = _started_tiny(tiny_checkpoint)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def narrow_server(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """Return a server of the tiny model that runs two sequences at a time, 16 tokens a step."""
    limits = {"OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_MAX_NUM_BATCHED_TOKENS": "16"}
    server = _started_tiny(tiny_checkpoint, environment=limits)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cramped_server(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """Return a server of the tiny model with 40 KV blocks."""
    server = _started_tiny(tiny_checkpoint, environment={"OCTAVO_NUM_KV_BLOCKS": "40"})
    yield server
    server.kill()
