"""A scheduler whose sizes, requests and mishaps are drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from octavo.errors import PromptTooLong
from octavo.request import FinishReason


@pytest.fixture(scope="session")
def draw_scheduler(make_scheduler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a driver with little room: swapping, cached, windowed or not."""

    def draw(data: st.DataObject, **limits: int) -> Any:
        return make_scheduler(
            num_blocks=data.draw(st.integers(3, 16)),
            num_host_blocks=data.draw(st.sampled_from([0, 8])),
            prefix_caching=data.draw(st.booleans()),
            window=data.draw(st.sampled_from([None, 6])),
            block_size=data.draw(st.sampled_from([1, 4, 16])),
            max_num_seqs=data.draw(st.integers(1, 5)),
            max_num_batched_tokens=data.draw(st.integers(5, 20)),
            max_model_len=data.draw(st.integers(3, 40)),
            **limits,
        )

    return draw


@pytest.fixture(scope="session")
def play_at_random() -> Callable[..., None]:
    """Return a function that adds, forks, preempts, aborts and steps at random, to the end.

    Each sequence gets one of `slots` for its adapter.
    """

    def play(
        data: st.DataObject, driver: Any, slots: Sequence[int], step: Callable[[], object]
    ) -> None:
        limits, cache = driver.scheduler.limits, driver.cache
        room = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        actions = st.lists(st.sampled_from("aassssxp"), min_size=10, max_size=40)
        for number, action in enumerate(data.draw(actions)):
            live = list(driver.scheduler.sequences())
            if action == "a":
                prompt = data.draw(st.integers(1, room - 1))
                n = data.draw(st.integers(1, min(2, limits.max_num_seqs)))
                max_tokens = data.draw(st.integers(1, 12))
                with suppress(PromptTooLong):  # with n of 2
                    added = driver.add(str(number), prompt, n=n, max_tokens=max_tokens)
                    added.lora_slot = data.draw(st.sampled_from(slots))
            elif action == "x" and live:
                name = data.draw(st.sampled_from(live)).request_id
                driver.scheduler.finish(name, FinishReason.ABORT)
            elif action == "p" and driver.running:
                driver.scheduler.preempt(driver.scheduler.running[-1], driver.now_s)
            elif live:
                step()
        while driver.scheduler.has_unfinished:
            step()

    return play
