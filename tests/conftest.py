"""The one Hypothesis profile, and what tests of every folder make requests with."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

# Before anything imports transformers: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from octavo.cache.block_copies import BlockCopies, SwapIn
from octavo.request import Request
from octavo.sampling_params import SamplingParams

# A shell that starts the tests in the background ignores SIGINT, and so would every process that
# they start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline: on a shared machine a slow example says nothing about the code.
settings.register_profile("octavo", deadline=None, print_blob=True)
settings.load_profile("octavo")


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Make a resolved request: a name, a prompt (ids, or how many), and more.

    The rest are sampling parameters, or fields of the request by their names.
    """
    own_fields = {field.name for field in fields(Request)}

    def make(name: str = "a", prompt: int | Sequence[int] = 5, **values: Any) -> Request:
        ids = range(10, 10 + prompt) if isinstance(prompt, int) else prompt
        own = {key: values.pop(key) for key in own_fields & values.keys()}
        params = SamplingParams(**{"max_tokens": 1000, "seed": 0, **values})
        return Request(name, tuple(ids), params, **own)

    return make


class DelayedTransfers:
    """Transfers whose swap-ins arrive in order, but only after `num_polls` more polls than usual.

    Until then their targets are NaN, and their sources are read only in the end: whoever reads or
    writes one of them too early spoils what is computed.
    """

    def __init__(self, attention: Any, device: Any, host: Any, num_polls: int = 1) -> None:
        # Tests of the client run where the engine's parts are not installed.
        from octavo.executor.block_transfers import DirectTransfers

        self.num_polls = num_polls
        self._device = device
        self._direct = DirectTransfers(attention, device, host)
        self._under_way: deque[SwapIn] = deque()
        self._polls_left: deque[int] = deque()

    def start(self, copies: BlockCopies) -> None:
        self._direct.start(BlockCopies(copies.swap_out, copies.copies))
        for swap_in in copies.swap_in:
            self._device.storage[[target for _, target in swap_in.pairs]] = float("nan")
            self._under_way.append(swap_in)
            self._polls_left.append(self.num_polls)

    def arrived(self) -> tuple[int, ...]:
        while self._polls_left and self._polls_left[0] <= 0:
            self._polls_left.popleft()
            self._direct.start(BlockCopies(swap_in=(self._under_way.popleft(),)))
        self._polls_left = deque(polls - 1 for polls in self._polls_left)
        return self._direct.arrived()

    def wait(self) -> None:
        if self._polls_left:
            self._polls_left[0] = 0


@pytest.fixture(scope="session")
def delayed_transfers() -> type[DelayedTransfers]:
    """Give the class, which takes the place of a runner's own transfers."""
    return DelayedTransfers
