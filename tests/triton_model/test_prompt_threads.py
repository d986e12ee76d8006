"""Long prompts wait beside the thread that takes requests in, and not without bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from octavo.errors import QueueFull
from octavo.triton_model.prompt_threads import (
    HUGE_PROMPT,
    LONG_PROMPT,
    MAX_WAITING_LENGTH,
    PromptThreads,
)


@pytest.fixture
def threads() -> Iterator[PromptThreads]:
    threads = PromptThreads()
    yield threads
    threads.close()


def test_a_short_prompt_is_the_callers_own_work(threads: PromptThreads) -> None:
    ran_in: list[threading.Thread] = []
    threads.run(LONG_PROMPT - 1, lambda: ran_in.append(threading.current_thread()))
    assert ran_in == [threading.current_thread()]


def test_what_waits_is_bounded_but_one_prompt_is_always_taken(threads: PromptThreads) -> None:
    go, ran = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        assert go.wait(10.0)
        ran.release()

    threads.run(2 * MAX_WAITING_LENGTH, work)
    for length in (LONG_PROMPT, HUGE_PROMPT):
        with pytest.raises(QueueFull) as refused:
            threads.run(length, work)
        assert str(refused.value) == (
            "long prompts of 134,217,728 characters wait to be tokenized, and of 67,108,864 at "
            "most may; try again later"
        )
    threads.run(LONG_PROMPT - 1, ran.release)
    go.set()
    assert ran.acquire(timeout=10.0)
    assert ran.acquire(timeout=10.0)
    threads.close()


def test_what_has_been_done_waits_no_more_even_if_it_failed() -> None:
    def fail() -> None:
        raise ValueError

    for _ in range(3):
        threads = PromptThreads()
        for _ in range(MAX_WAITING_LENGTH // HUGE_PROMPT):
            threads.run(HUGE_PROMPT, fail)
        threads.close()
        assert threads._waiting_length == 0
