"""Thousands of cancels that race with the natural end, seen from where the responses are sent."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

NUM_REQUESTS = 2000
NUM_IN_FLIGHT = 8


def test_cancels_that_race_with_the_end_leave_one_final_answer_each(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    """The fixture `ask` counts final flags, and what is sent or asked after them."""
    serving = make_service()
    chance = random.Random(1)
    senders = []

    def race() -> None:
        for _ in range(NUM_REQUESTS // NUM_IN_FLIGHT):
            sender = ask(serving, "ab", stream=True, max_tokens=chance.randrange(1, 5))
            time.sleep(chance.uniform(0.0, 0.04))
            sender.cancelled = True
            sender.wait_final()
            senders.append(sender)

    threads = [threading.Thread(target=race) for _ in range(NUM_IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(senders) == NUM_REQUESTS
    codes = [sender.responses[-1].error for sender in senders]
    num_cancelled = sum(error is not None and error.code == "CANCELLED" for error in codes)
    assert NUM_REQUESTS // 50 < num_cancelled < NUM_REQUESTS
    eventually(lambda: pb_utils.MetricFamily.series["octavo_kv_blocks_used"].values[-1] == 0)
    assert ask(serving, "ab", max_tokens=1).wait_final().text == "aba"
