"""A model on several ranks is served as on one, and comes back when a rank dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.local.triton_server import TritonServer
from octavo.model.shard import Shard
from octavo_client import Client, Completion, Unavailable

pytestmark = pytest.mark.e2e

FindProcesses = Callable[[TritonServer, str], list[psutil.Process]]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]

ENGINE = "octavo.engine_process"
PROMPTS = ("a", "one two three four five six", "the sea " * 40, "1 2 3 4", "b")
SHORT = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
MEDIUM = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[(2, 1), (1, 2)],
    ids=lambda sizes: f"tp{sizes[0]}-pp{sizes[1]}",
)
def grid_server(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Path,
    serving_cleanly: Callable[..., AbstractContextManager[TritonServer]],
) -> Iterator[TritonServer]:
    """Return a server of the tiny model on several ranks; nothing of it is left at the end."""
    tp, pp = request.param
    with serving_cleanly(
        model=str(tiny_checkpoint),
        device="cpu",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        environment={"OCTAVO_CPU_THREADS": "1", "OCTAVO_NUM_KV_BLOCKS": "4096"},
        flags=("--model-control-mode=explicit", "--load-model=octavo"),
    ) as server:
        yield server


@pytest.fixture
def client(grid_server: TritonServer) -> Iterator[Client]:
    with Client(grid_server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture
def workers(
    grid_server: TritonServer, find_workers: Callable[[TritonServer], list[psutil.Process]]
) -> Callable[[], list[psutil.Process]]:
    """Return a function that finds the ranks of the server but the first, in their order."""
    return lambda: find_workers(grid_server)


def streamed(client: Client) -> list[Completion]:
    """Stream answers to all prompts at once; return them put together."""

    def ask(prompt: str) -> Completion:
        return Completion.from_deltas(client.stream(prompt, **SHORT))

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS))


def begun(client: Client, params: dict[str, Any]) -> Any:
    """Open a stream and read its first delta."""
    stream = client.stream("a", **params)
    next(stream)
    return stream


def num_ranks(server: TritonServer) -> int:
    sizes = (server.options.tensor_parallel_size, server.options.pipeline_parallel_size)
    return (sizes[0] or 1) * (sizes[1] or 1)


def test_streams_have_the_tokens_of_one_rank(
    tiny_server: TritonServer,
    grid_server: TritonServer,
    client: Client,
    workers: Callable[[], list[psutil.Process]],
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as alone:
        expected = streamed(alone)
    assert streamed(client) == expected
    assert len(workers()) == num_ranks(grid_server) - 1


def test_a_cancelled_stream_gives_its_blocks_back(
    grid_server: TritonServer, client: Client, metrics: Metrics, become: Become
) -> None:
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] == 0)
    stream = begun(client, LONG)
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] > 0)
    stream.close()
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] == 0, 5.0)


def test_a_killed_rank_is_named_to_every_live_request_and_the_engine_comes_back(
    grid_server: TritonServer,
    client: Client,
    workers: Callable[[], list[psutil.Process]],
    metrics: Metrics,
    become: Become,
) -> None:
    before = client.generate("a", **SHORT)
    streams = [begun(client, LONG) for _ in range(3)]
    killed = workers()
    killed[-1].kill()
    sizes = (grid_server.options.tensor_parallel_size, grid_server.options.pipeline_parallel_size)
    name = Shard.of(len(killed), *sizes)
    for stream in streams:
        with pytest.raises(Unavailable) as error:
            list(stream)
        assert f"{name} died (signal 9, SIGKILL)" in str(error.value)
    assert become(lambda: metrics(grid_server)["engine_up"] == 0)
    assert become(lambda: not any(worker.is_running() for worker in killed))
    assert become(lambda: metrics(grid_server)["engine_up"] == 1, 60.0)
    assert client.generate("a", **SHORT) == before
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] == 0)


def test_an_unload_lets_a_stream_finish_and_leaves_no_rank(
    grid_server: TritonServer,
    client: Client,
    workers: Callable[[], list[psutil.Process]],
    find_processes: FindProcesses,
    post: Callable[..., tuple[int, str]],
    become: Become,
) -> None:
    stream = begun(client, MEDIUM)
    assert post(grid_server, "repository/models/octavo/unload", {}) == (200, "")
    assert sum(delta.num_output_tokens for delta in stream) > 250
    assert become(lambda: not workers() and not find_processes(grid_server, ENGINE), 20.0)
