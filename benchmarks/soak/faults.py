"""Faults on a schedule: the engine is killed, the model is unloaded and loaded again.

Knows nothing of the traffic; an outage lasts until a token is generated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from dataclasses import dataclass

from benchmarks.soak.processes import find_processes

from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient, OctavoClientError

LOAD_TIMEOUT_S = 120.0
_MODEL = "v2/repository/models/octavo"


@dataclass(frozen=True, slots=True)
class Outage:
    """A fault and how long nothing was generated; times are of the monotonic clock."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """When what happens, in seconds from the start; the last minute's quarter stays quiet."""

    duration_s: float
    kill_every_s: float
    num_reloads: int

    def events(self) -> list[tuple[float, str]]:
        """Return the faults in order."""
        quiet_s = min(60.0, self.duration_s / 4)
        kills = [
            (self.kill_every_s * number, "kill -9 of the engine")
            for number in range(1, int((self.duration_s - quiet_s) / self.kill_every_s) + 1)
        ]
        share_s = self.duration_s / (self.num_reloads + 1)
        reloads = [
            (share_s * number, "unload and load") for number in range(1, self.num_reloads + 1)
        ]
        return sorted(kills + reloads)


async def play(
    schedule: Schedule, server: TritonServer, client: AsyncClient, start_s: float
) -> list[Outage]:
    """Bring about each fault at its time; return what it cost."""
    outages = []
    for at_s, kind in schedule.events():
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        fault_s = time.monotonic()
        if kind == "unload and load":
            await _reload(server, client)
        else:
            find_processes(server)["engine"].kill()
        await _wait_for_token(client)
        outages.append(Outage(kind, fault_s, time.monotonic()))
    return outages


async def _reload(server: TritonServer, client: AsyncClient) -> None:
    await asyncio.to_thread(_post, f"{server.http_url}/{_MODEL}/unload")
    # Triton says so only once the requests that ran have ended.
    while await client.is_ready():
        await asyncio.sleep(0.05)
    await asyncio.to_thread(_post, f"{server.http_url}/{_MODEL}/load")


def _post(url: str) -> None:
    urllib.request.urlopen(url, data=b"{}", timeout=LOAD_TIMEOUT_S).close()


async def _wait_for_token(client: AsyncClient) -> None:
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OctavoClientError):
            await client.health(timeout_s=30.0)
            return
        await asyncio.sleep(0.1)
