"""Requests to one server, each watched until its end, and what came of them.

A share is cancelled on the way and a share is wrong. Knows nothing of faults: who knows when the
server was down judges the refusals.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from dataclasses import dataclass, field
from typing import Any

from octavo_client import AsyncClient, InvalidRequest, OctavoClientError, Unavailable

CANCEL_SHARE, BAD_SHARE = 0.10, 0.05
#: Nothing takes as long: what is not answered by then is lost.
LOST_AFTER_S = 60.0
PROMPT_TOKENS, OUTPUT_TOKENS = (8, 64), (16, 48)
_TOKEN_IDS = range(100, 40_000)
_BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"input_ids": [10**6]},
    {"top_p": "much"},
    {"input_ids": [5] * 100_000},
    {"stop": [""]},
)


class End(enum.StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"
    CANCELLED = "cancelled by its client"
    REFUSED = "wrong and refused as such"
    UNAVAILABLE = "refused or ended while the engine was away"
    BROKEN = "broken promise"


@dataclass(frozen=True, slots=True)
class Record:
    """One request; times are of the monotonic clock, in seconds."""

    sent_s: float
    ended_s: float
    end: End
    reason: str = ""


@dataclass(slots=True)
class Traffic:
    """Sends requests of a seeded mixture; an event loop owns it."""

    client: AsyncClient
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    records: list[Record] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """When how many tokens came."""

    async def measure_capacity(self, num_at_a_time: int, duration_s: float) -> float:
        """Keep requests running; return how many a second ended in the second half of the time."""
        start_s = time.monotonic()
        num_before = len(self.records)

        async def repeat() -> None:
            while time.monotonic() < start_s + duration_s:
                await self.send()

        await asyncio.gather(*(repeat() for _ in range(num_at_a_time)))
        middle_s, end_s = start_s + duration_s / 2, start_s + duration_s
        ends_s = [record.ended_s for record in self.records[num_before:]]
        return sum(middle_s <= at_s < end_s for at_s in ends_s) / (end_s - middle_s)

    async def keep_up(self, rate: float, end_s: float) -> None:
        """Send `rate` requests a second, evenly, until `end_s`; return when all have ended."""
        next_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while next_s < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                group.create_task(self.send())
                next_s += 1.0 / rate

    async def send(self) -> None:
        """Send one request, read it to its end and record it."""
        kind = self.chance.random()
        is_bad = kind < BAD_SHARE
        request: dict[str, Any] = {
            "input_ids": self.chance.choices(_TOKEN_IDS, k=self.chance.randint(*PROMPT_TOKENS)),
            "max_tokens": self.chance.randint(*OUTPUT_TOKENS),
            "ignore_eos": True,
        }
        cancel_at = None
        if is_bad:
            request |= self.chance.choice(_BAD)
        elif kind < BAD_SHARE + CANCEL_SHARE:
            cancel_at = self.chance.randint(0, request["max_tokens"] - 1)
        sent_s = time.monotonic()
        end, reason = await self._follow(request, cancel_at, is_bad)
        self.records.append(Record(sent_s, time.monotonic(), end, reason))

    async def _follow(
        self, request: dict[str, Any], cancel_at: int | None, is_bad: bool
    ) -> tuple[End, str]:
        """Read a request's responses; cancel it once it has `cancel_at` tokens."""
        num_tokens = num_finals = 0
        try:
            async with self.client.stream(**request, timeout_s=LOST_AFTER_S) as stream:
                if cancel_at == 0:
                    return End.CANCELLED, ""
                async for delta in stream:
                    num_tokens += delta.num_output_tokens
                    num_finals += delta.finish_reason is not None
                    self.tokens.append((time.monotonic(), delta.num_output_tokens))
                    if cancel_at is not None and num_tokens >= cancel_at and not num_finals:
                        return End.CANCELLED, ""
        except InvalidRequest as error:
            return (End.REFUSED, "") if is_bad else (End.BROKEN, f"refused as wrong: {error}")
        except Unavailable as error:
            return End.UNAVAILABLE, str(error)
        except OctavoClientError as error:
            return End.BROKEN, f"{type(error).__name__}: {error}"
        if is_bad or num_finals != 1 or num_tokens != request["max_tokens"]:
            said = f"{num_finals} finals, {num_tokens} of {request['max_tokens']} tokens"
            return End.BROKEN, f"{said}{' for a wrong request' if is_bad else ''}"
        return End.FINISHED, ""
