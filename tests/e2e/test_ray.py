"""A model over two nodes of a Ray cluster is served as on one rank, and comes back with a node."""

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

Become = Callable[..., bool]
Metrics = Callable[[TritonServer], dict[str, float]]

PROMPTS = ("a", "one two three four five six", "the sea " * 40, "b")
SHORT = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp2", "pp2"])
def ray_server(
    request: pytest.FixtureRequest,
    ray_nodes: Any,
    tiny_checkpoint: Path,
    serving_cleanly: Callable[..., AbstractContextManager[TritonServer]],
    become: Become,
) -> Iterator[TritonServer]:
    """Return a server whose engine has a rank on each node; nothing of it is left at the end."""
    tp, pp = request.param
    with serving_cleanly(
        model=str(tiny_checkpoint),
        device="cpu",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        environment={
            "OCTAVO_DISTRIBUTED_EXECUTOR_BACKEND": "ray",
            "RAY_ADDRESS": ray_nodes.address,
            "OCTAVO_CPU_THREADS": "2",
            "OCTAVO_NUM_KV_BLOCKS": "4096",
        },
    ) as server:
        yield server
    assert become(lambda: not ranks())


@pytest.fixture
def client(ray_server: TritonServer) -> Iterator[Client]:
    with Client(ray_server.grpc_url, timeout_s=60) as client:
        yield client


def ranks() -> list[psutil.Process]:
    """Return the processes of all ranks but the first."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if "ray::RayRank" in " ".join(each.info["cmdline"] or [])]


def streamed(client: Client) -> list[Completion]:
    """Stream answers to all prompts at once; return them put together."""

    def ask(prompt: str) -> Completion:
        return Completion.from_deltas(client.stream(prompt, **SHORT))

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS))


def begun(client: Client) -> Any:
    """Open a stream and read its first delta."""
    stream = client.stream("a", **LONG)
    next(stream)
    return stream


def test_streams_over_two_nodes_have_the_tokens_of_one_rank(
    tiny_server: TritonServer, client: Client, ray_nodes: Any
) -> None:
    (rank,) = ranks()
    assert f"--node_ip_address={ray_nodes.other_host}" in rank.parent().cmdline()
    with Client(tiny_server.grpc_url, timeout_s=60) as alone:
        expected = streamed(alone)
    assert streamed(client) == expected


def test_a_lost_node_is_named_to_every_live_request_and_the_engine_comes_back_with_another(
    ray_server: TritonServer, client: Client, ray_nodes: Any, metrics: Metrics, become: Become
) -> None:
    before = client.generate("a", **SHORT)
    streams = [begun(client) for _ in range(3)]
    ray_nodes.lose()
    sizes = (ray_server.options.tensor_parallel_size, ray_server.options.pipeline_parallel_size)
    name = f"{Shard.of(1, *sizes)} on {ray_nodes.other_host}"
    for stream in streams:
        with pytest.raises(Unavailable) as error:
            list(stream)
        assert f"{name} is lost with its node" in str(error.value)
    assert become(lambda: metrics(ray_server)["engine_up"] == 0)
    assert become(lambda: not ranks())
    ray_nodes.restore()
    assert become(lambda: metrics(ray_server)["engine_up"] == 1, 90.0)
    assert client.generate("a", **SHORT) == before
    assert become(lambda: metrics(ray_server)["kv_blocks_used"] == 0)
