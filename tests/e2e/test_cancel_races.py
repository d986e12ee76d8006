"""Ten thousand cancels that race with the natural end: nothing is answered twice, nothing stays.

Triton 2.51 itself can crash when a model that writes without a pause has its streams cancelled at
some thousands a second; here 16 are in flight, which makes a few hundred a second, and which it
survives. What the model sends for each, the test of the same name against fakes looks at; here the
model's own count says that each request had one final answer.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient, RequestCancelled

pytestmark = pytest.mark.e2e

StartServer = Callable[..., TritonServer]
Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
FindProcess = Callable[[TritonServer, str], psutil.Process]

NUM_REQUESTS = 10_000
NUM_IN_FLIGHT = 16
#: When the cancel is sent, as a share of how long requests have lately taken to end.
AROUND_THE_END = (0.3, 1.2)


class Racer:
    """Sends requests of a few tokens and cancels each at about the time it ends by itself."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        self.num_final: collections.Counter[int] = collections.Counter()
        """How many requests showed their client so many final responses."""
        self._clients = clients
        self._random = random.Random(1)
        self._usual_s = 0.05

    async def race_all(self) -> None:
        numbers = iter(range(NUM_REQUESTS))
        await asyncio.gather(*(self._race_each(numbers) for _ in range(NUM_IN_FLIGHT)))

    async def _race_each(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            self.num_final[await self._race(self._clients[number % len(self._clients)])] += 1

    async def _race(self, client: AsyncClient) -> int:
        """Send one request; return how many final responses its client has seen."""
        num_final = 0
        prompt = self._random.choices(range(100, 4000), k=3)
        num_tokens = self._random.randrange(1, 8)
        stream = client.stream(input_ids=prompt, max_tokens=num_tokens, ignore_eos=True)

        async def read() -> None:
            nonlocal num_final
            async for delta in stream:
                num_final += delta.finish_reason is not None

        started = time.monotonic()
        reading = asyncio.create_task(read())
        await asyncio.wait([reading], timeout=self._usual_s * self._random.uniform(*AROUND_THE_END))
        has_ended = reading.done()
        await stream.close()
        try:
            await reading
        except RequestCancelled:
            assert not has_ended
        # Ends only just after the cancel are not seen, so the estimate must be pushed up by those.
        took_s = time.monotonic() - started if has_ended else 1.2 * self._usual_s
        self._usual_s += 0.02 * (took_s - self._usual_s)
        return num_final


async def race(url: str) -> collections.Counter[int]:
    clients = [AsyncClient(url, timeout_s=60) for _ in range(4)]
    racer = Racer(clients)
    try:
        await racer.race_all()
    finally:
        for client in clients:
            await client.close()
    return racer.num_final


def test_cancels_that_race_with_the_end_leave_one_final_answer_each(
    start_server: StartServer, metrics: Metrics, become: Become, find_process: FindProcess
) -> None:
    server = start_server()
    processes = [find_process(server, word) for word in ("octavo.engine_process", "backend_stub")]

    def finals(reason: str) -> float:
        return metrics(server)[f"requests_total {reason}"]

    def is_idle() -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        return [metrics(server)[name] for name in names] == [0, 0, 0]

    seen = asyncio.run(race(server.grpc_url))
    assert seen.keys() == {0, 1}, "a client saw two final responses"
    assert become(is_idle)
    # A cancel that overtakes its request leaves nothing for the model to answer.
    assert become(lambda: finals("length") + finals("abort") > 0.9 * NUM_REQUESTS)
    ended, cancelled = finals("length"), finals("abort")
    assert ended + cancelled <= NUM_REQUESTS
    assert ended >= seen[1]
    assert min(ended, cancelled) > NUM_REQUESTS // 20, "most cancels were early, or late"
    assert finals("error") == 0
    assert all(process.is_running() for process in processes)
