from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.triton_model.service import Service
from octavo.triton_model.unload_watch import UnloadWatch


def test_two_refusals_in_a_row_are_an_unload() -> None:
    answers = iter([True, False, True, False, False])
    watch = UnloadWatch(lambda: next(answers))
    assert [watch.sees_unload(now_s, True) for now_s in (0, 1, 2, 3, 4)] == [False] * 4 + [True]


def test_triton_is_asked_twice_a_second_at_most() -> None:
    asked: list[int] = []
    watch = UnloadWatch(lambda: not asked.append(0))
    for step in range(100):
        watch.sees_unload(step / 50, True)
    assert len(asked) == 4


def test_a_model_that_is_not_serving_learns_nothing() -> None:
    watch = UnloadWatch(lambda: False)
    assert not any(watch.sees_unload(now_s, now_s % 2 == 0) for now_s in range(10))


def test_a_question_that_fails_is_no_unload() -> None:
    def fail() -> bool:
        raise RuntimeError("no shared memory")

    watch = UnloadWatch(fail)
    assert not any(watch.sees_unload(now_s, True) for now_s in range(4))


def test_live_requests_of_an_unloaded_model_get_the_drain_timeout(
    make_service: Callable[..., Service], ask: Callable[..., Any]
) -> None:
    service = make_service(drain_timeout_s=0.1)
    service.watch_unloads(UnloadWatch(lambda: False))
    sender = ask(service, "ab", stream=True, max_tokens=10**6).wait_final()
    error = sender.responses[-1].error
    assert (error.code, error.reason) == (
        "UNAVAILABLE",
        "the server stops before the request is finished",
    )
    assert not service.is_ready
