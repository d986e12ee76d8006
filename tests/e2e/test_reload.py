"""Models are loaded, changed and unloaded while others, or their own requests, run on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from octavo.local.bundle import write_repository
from octavo.local.guardian import MARKER, SHARED_MEMORY
from octavo.local.triton_server import TritonServer
from octavo_client import Client, Completion, InvalidRequest, OctavoClientError, Unavailable

pytestmark = pytest.mark.e2e

SetOptions = Callable[..., None]
Post = Callable[..., tuple[int, str]]
Become = Callable[..., bool]

SHORT = {"max_tokens": 16, "seed": 1, "ignore_eos": True}
MEDIUM = {"max_tokens": 600, "seed": 1, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True}
MODELS = "repository/models"
LOADED = (200, "")


@pytest.fixture(scope="module")
def explicit_server(
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[TritonServer]],
) -> Iterator[TritonServer]:
    """Return a server that loads on demand: `octavo`, which is loaded, and `other`, its like."""
    repository = tmp_path_factory.mktemp("models")
    write_repository(repository, {"model": str(tiny_checkpoint)})
    shutil.copytree(repository / "octavo", repository / "other")
    with serving(
        repository=repository,
        environment={"OCTAVO_CPU_THREADS": "1", "OCTAVO_NUM_KV_BLOCKS": "4096"},
        flags=("--model-control-mode=explicit", "--load-model=octavo"),
    ) as server:
        yield server


@pytest.fixture
def client(explicit_server: TritonServer) -> Iterator[Client]:
    with Client(explicit_server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def set_options(explicit_server: TritonServer) -> Callable[..., None]:
    """Return a function that writes the options of `octavo`: those it had, and some more."""
    assert explicit_server.options.repository is not None
    file = explicit_server.options.repository / "octavo" / "1" / "engine.json"
    first = json.loads(file.read_text())

    def write(**options: Any) -> None:
        text = json.dumps({**first, **options})
        if text != file.read_text():  # else the next load would make a new instance for nothing
            file.write_text(text)

    return write


def belongings(server: TritonServer) -> dict[str, int]:
    """Count what a server holds: child processes, files other than connections, shared memory."""
    process = psutil.Process(server.pid)
    name = process.environ()[MARKER]
    return {
        "processes": len(process.children(recursive=True)),
        "files": process.num_fds() - len(process.net_connections()),
        "shared memory": len(list(SHARED_MEMORY.glob(f"{name}*"))),
    }


def begun(client: Client, params: dict[str, Any]) -> Any:
    """Open a stream and read its first delta."""
    stream = client.stream("a", **params)
    next(stream)
    return stream


def refuse_many(client: Client) -> None:
    """Send requests at once that the engine refuses a moment after they were taken in."""

    def ask(_: int) -> None:
        with pytest.raises(InvalidRequest):
            client.generate("a", structured_outputs={"regex": "((a"}, **SHORT)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(ask, range(40)))


def num_tokens(stream: Any) -> int:
    return sum(delta.num_output_tokens for delta in stream)


def test_a_load_with_changed_options_takes_over_and_running_streams_finish_on_the_old(
    explicit_server: TritonServer, client: Client, set_options: SetOptions, post: Post
) -> None:
    right = client.generate("a", **SHORT)
    with ThreadPoolExecutor(1) as reader:
        count = reader.submit(num_tokens, begun(client, MEDIUM))
        set_options(max_num_seqs=2)
        assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
        with pytest.raises(InvalidRequest, match="max_num_seqs is 2"):
            client.generate("a", n=3, **SHORT)
        assert client.generate("a", **SHORT) == right
        assert 500 < count.result(timeout=60) < 600


def test_a_load_may_override_the_options_by_parameters_of_a_config(
    explicit_server: TritonServer, client: Client, post: Post
) -> None:
    config = {
        "backend": "octavo",
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {"max_num_seqs": {"string_value": "3"}},
    }
    body = {"parameters": {"config": json.dumps(config)}}
    assert post(explicit_server, f"{MODELS}/octavo/load", body) == LOADED
    with pytest.raises(InvalidRequest, match="max_num_seqs is 3"):
        client.generate("a", n=4, **SHORT)


def test_a_load_with_a_wrong_option_fails_and_the_old_model_serves_on(
    explicit_server: TritonServer, client: Client, set_options: SetOptions, post: Post
) -> None:
    right = client.generate("a", **SHORT)
    set_options(max_num_seq=2)
    status, answer = post(explicit_server, f"{MODELS}/octavo/load", {})
    assert status == 400
    assert "unknown engine option 'max_num_seq'; did you mean 'max_num_seqs'?" in answer
    assert client.generate("a", **SHORT) == right


def test_an_unload_lets_running_streams_finish_and_a_load_serves_as_before(
    explicit_server: TritonServer,
    client: Client,
    set_options: SetOptions,
    post: Post,
    become: Become,
) -> None:
    set_options()
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    right = client.generate("a", **MEDIUM)
    streams = [begun(client, MEDIUM) for _ in range(3)]
    assert post(explicit_server, f"{MODELS}/octavo/unload", {}) == LOADED
    with pytest.raises(Unavailable):
        client.generate("a", **SHORT)
    rest = [Completion.from_deltas(stream) for stream in streams]
    assert all(right.text.endswith(answer.text) for answer in rest)
    assert {answer.finish_reason for answer in rest} == {"length"}
    assert become(lambda: not client.is_ready())
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    assert client.generate("a", **MEDIUM) == right


def test_a_load_while_a_drain_runs_serves_new_requests_and_ends_the_old_ones_in_time(
    explicit_server: TritonServer, client: Client, set_options: SetOptions, post: Post
) -> None:
    set_options(drain_timeout_s=1)
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    stream = begun(client, LONG)
    assert post(explicit_server, f"{MODELS}/octavo/unload", {}) == LOADED
    with pytest.raises(Unavailable):
        client.generate("a", **SHORT)
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    client.generate("a", **SHORT)
    with pytest.raises(Unavailable, match="the server stops before the request is finished"):
        list(stream)


def test_a_client_that_keeps_its_stream_open_holds_no_engine_of_an_unloaded_model(
    explicit_server: TritonServer,
    client: Client,
    set_options: SetOptions,
    post: Post,
    exchange: Callable[[TritonServer], Any],
    find_process: Callable[[TritonServer, str], psutil.Process],
    become: Become,
) -> None:
    """The stub alone stays as long as the stream, for Triton does not end it."""
    set_options(drain_timeout_s=1)
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    assert become(lambda: belongings(explicit_server)["processes"] == 2, 60.0)
    engine = find_process(explicit_server, "octavo.engine_process")
    with exchange(explicit_server) as stream:
        tensors = {"text_input": "a", "stream": True, "sampling_parameters": json.dumps(LONG)}
        stream.send(tensors)
        stream.receive()
        assert post(explicit_server, f"{MODELS}/octavo/unload", {}) == LOADED
        with pytest.raises(InferenceServerException, match="the server stops before the request"):
            stream.receive_all()
        assert become(lambda: not engine.is_running())
        assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
        client.generate("a", **SHORT)
        assert belongings(explicit_server)["processes"] == 3
    assert become(lambda: belongings(explicit_server)["processes"] == 2, 60.0)


def test_two_models_live_apart_and_unloads_leave_nothing(
    explicit_server: TritonServer, client: Client, post: Post, become: Become
) -> None:
    right = client.generate("a", **SHORT)
    left: dict[str, int] = {}
    for _ in range(2):
        assert post(explicit_server, f"{MODELS}/other/load", {}) == LOADED
        with Client(explicit_server.grpc_url, "other", timeout_s=60) as other:
            assert other.generate("a", **SHORT) == right
            refuse_many(other)
            stream = begun(client, MEDIUM)
            assert post(explicit_server, f"{MODELS}/other/unload", {}) == LOADED
            assert num_tokens(stream) > 500
            with pytest.raises(OctavoClientError):
                other.generate("a", **SHORT)
        assert become(lambda: belongings(explicit_server)["processes"] == 2, 60.0)
        left = left or belongings(explicit_server)
    assert become(lambda: belongings(explicit_server) == left), (left, belongings(explicit_server))
    assert left["shared memory"] == 1
    assert client.generate("a", **SHORT) == right


def test_an_unload_with_a_frozen_engine_is_bounded(
    explicit_server: TritonServer,
    client: Client,
    set_options: SetOptions,
    post: Post,
    find_process: Callable[[TritonServer, str], psutil.Process],
    become: Become,
) -> None:
    set_options(drain_timeout_s=1)
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    assert become(lambda: belongings(explicit_server)["processes"] == 2, 60.0)
    engine = find_process(explicit_server, "octavo.engine_process")
    stream = begun(client, LONG)
    engine.suspend()
    assert post(explicit_server, f"{MODELS}/octavo/unload", {}) == LOADED
    stream.close()
    assert become(lambda: not engine.is_running())
    assert post(explicit_server, f"{MODELS}/octavo/load", {}) == LOADED
    client.generate("a", **SHORT)
