"""A thousand clients at once, and five thousand requests in a queue: all answered, each once.

Each client has a connection of its own and each request a stream of its own, which is all that a
server sees of a client; that they live in one process of asyncio saves the machine for the server.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient, Completion, Unavailable

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
FindProcess = Callable[[TritonServer, str], psutil.Process]

NUM_CLIENTS = 1000
NUM_QUEUED = 5000
NUM_REFUSED = 100
NUM_SEQS = 16
SHORT: dict[str, Any] = {"input_ids": [7] * 8, "max_tokens": 2, "ignore_eos": True, "seed": 1}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 30_000}
LIMITS = {
    "OCTAVO_MAX_NUM_SEQS": str(NUM_SEQS),
    "OCTAVO_MAX_NUM_QUEUED_REQUESTS": str(NUM_QUEUED),
    # Room for all of them and a little more, so that each limit can be met alone.
    "OCTAVO_MAX_NUM_QUEUED_TOKENS": str(NUM_QUEUED * 8 + 100),
}
MOST_KIB_A_QUEUED_REQUEST = {"octavo.engine_process": 16, "backend_stub": 8}


@pytest.fixture(scope="module", autouse=True)
def _enough_files() -> Iterator[None]:
    """Let this process and the servers it starts have a socket for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def open_clients(server: TritonServer) -> AsyncIterator[list[AsyncClient]]:
    clients = [AsyncClient(server.grpc_url, timeout_s=120) for _ in range(NUM_CLIENTS)]
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def is_idle(figures: dict[str, float]) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
    return [figures[name] for name in names] == [0, 0, 0]


def test_thousand_clients_at_once_are_all_answered(
    tiny_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    async def ask_all() -> list[Completion]:
        async with open_clients(tiny_server) as clients:
            return await asyncio.gather(*(client.generate(**SHORT) for client in clients))

    before = metrics(tiny_server)["requests_total length"]
    answers = asyncio.run(ask_all())
    assert len(answers) == NUM_CLIENTS
    assert {(answer.token_ids, answer.finish_reason) for answer in answers} == {
        (answers[0].token_ids, "length")
    }
    all_counted = before + NUM_CLIENTS
    assert become(lambda: metrics(tiny_server)["requests_total length"] == all_counted)
    assert become(lambda: is_idle(metrics(tiny_server)))


async def time_refusal(client: AsyncClient, limit: str, **changes: Any) -> float:
    """Send a request that must be refused because of `limit`; return the seconds that it took."""
    started = time.monotonic()
    with pytest.raises(Unavailable, match=limit):
        await client.generate(**{**SHORT, **changes})
    return time.monotonic() - started


class FullQueue:
    """Fills the queue of a server whose seats are taken, and looks at what it does then."""

    def __init__(self, server: TritonServer, metrics: Metrics) -> None:
        self.refusals_s: list[float] = []
        self._read = lambda: metrics(server)
        self._server = server

    async def play(self, look: Callable[[], None]) -> list[Completion]:
        """Return the answers to all that could wait; call `look` while everything waits."""
        async with open_clients(self._server) as clients:
            seated = [clients[i].stream(**LONG) for i in range(NUM_SEQS)]
            for stream in seated:
                await anext(stream)
            asked = [
                asyncio.create_task(clients[i % NUM_CLIENTS].generate(**SHORT))
                for i in range(NUM_QUEUED)
            ]
            await self._until_wait(NUM_QUEUED)
            look()
            for client in clients[:NUM_REFUSED]:
                self.refusals_s.append(await time_refusal(client, "max_num_queued_requests"))
            assert self._read()["num_requests_waiting"] == NUM_QUEUED
            # One request leaves: now the next may wait, but not with a prompt of 200 tokens.
            asked.pop().cancel()
            await self._until_wait(NUM_QUEUED - 1)
            await time_refusal(clients[0], "max_num_queued_tokens", input_ids=[7] * 200)
            assert not any(task.done() for task in asked)
            for stream in seated:
                await stream.close()
            return await asyncio.gather(*asked)

    async def _until_wait(self, count: int) -> None:
        deadline = time.monotonic() + 60.0
        while (waiting := self._read()["num_requests_waiting"]) != count:
            assert time.monotonic() < deadline, f"{waiting:g} requests wait but {count} should"
            await asyncio.sleep(0.1)


def test_five_thousand_requests_wait_in_bounded_memory_and_all_are_answered(
    start_server: StartServer, metrics: Metrics, become: Become, find_process: FindProcess
) -> None:
    server = start_server(environment=LIMITS)
    processes = {word: find_process(server, word) for word in MOST_KIB_A_QUEUED_REQUEST}
    before = {word: process.memory_info().rss for word, process in processes.items()}
    grown_kib: dict[str, float] = {}

    def look() -> None:
        for word, process in processes.items():
            grown_kib[word] = (process.memory_info().rss - before[word]) / 1024 / NUM_QUEUED

    full = FullQueue(server, metrics)
    answers = asyncio.run(full.play(look))
    assert len(answers) == NUM_QUEUED - 1
    assert {(len(answer.token_ids), answer.finish_reason) for answer in answers} == {(2, "length")}
    assert statistics.median(full.refusals_s) < 0.5
    assert max(full.refusals_s) < 5.0, "a busy machine may be late now and then, but not by this"
    assert all(grown_kib[word] < most for word, most in MOST_KIB_A_QUEUED_REQUEST.items())
    assert become(lambda: metrics(server)["requests_total length"] == NUM_QUEUED - 1)
    assert become(lambda: is_idle(metrics(server)))
    figures = metrics(server)
    assert figures["admission_rejections_total max_num_queued_requests"] == NUM_REFUSED
    assert figures["admission_rejections_total max_num_queued_tokens"] == 1
    assert all(process.is_running() for process in processes.values())
