"""An unload, or the server's stop, is noticed by asking, and then everything ends in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.engine_client import EngineState
from octavo.triton_model.service import Service
from octavo.triton_model.unload_watch import UnloadWatch

Eventually = Callable[[Callable[[], bool]], None]


class Triton:
    """Gives one answer after the other, then the last one for ever; counts questions and unloads.

    An answer is whether Triton refuses, and whether the model itself would serve then.
    """

    def __init__(self, *answers: tuple[bool, bool]) -> None:
        self._answers = list(answers)
        self.num_asked = 0
        self.num_looks = 0
        self.unloaded = threading.Event()

    def is_serving(self) -> bool:
        if self.num_looks:
            self._answers = self._answers[1:] or self._answers
        self.num_looks += 1
        return self._answers[0][1]

    def is_refusing(self) -> bool:
        self.num_asked += 1
        return self._answers[0][0]


@pytest.fixture
def watch() -> Iterator[Callable[[Triton], UnloadWatch]]:
    """Watch a server, a hundred times a second; no watch outlives the test."""
    watches: list[UnloadWatch] = []

    def start(triton: Triton) -> UnloadWatch:
        watch = UnloadWatch(
            triton.is_refusing,
            is_serving=triton.is_serving,
            on_unload=triton.unloaded.set,
            interval_s=0.01,
        )
        watches.append(watch)
        return watches[-1]

    yield start
    for each in watches:
        each.stop()
    assert not any(thread.name == "unload-watch" for thread in threading.enumerate())


def test_two_refusals_in_a_row_are_an_unload_and_nobody_is_asked_again(
    watch: Callable[[Triton], UnloadWatch],
) -> None:
    triton = Triton(*((answer, True) for answer in (False, True, False, True, True)))
    watch(triton)
    assert triton.unloaded.wait(10.0)
    assert triton.num_asked == 5


def test_a_model_that_is_not_serving_asks_nobody_and_forgets_a_refusal(
    watch: Callable[[Triton], UnloadWatch], eventually: Eventually
) -> None:
    triton = Triton((True, True), (True, False), (True, True), (True, False))
    watch(triton)
    eventually(lambda: triton.num_looks > 6)
    assert triton.num_asked == 2
    assert not triton.unloaded.is_set()


def test_an_unloaded_model_ends_its_requests_in_time_and_then_its_engine(
    make_service: Callable[..., Service], ask: Callable[..., Any], eventually: Eventually
) -> None:
    """Triton itself would wait for every client that keeps its stream open."""
    service = make_service(drain_timeout_s=0.1)
    sender = ask(service, "ab", stream=True, max_tokens=10**6)
    service.watch_unloads(lambda: True)
    error = sender.wait_final().responses[-1].error
    assert (error.code, error.reason) == (
        "UNAVAILABLE",
        "the server stops before the request is finished",
    )
    eventually(lambda: service._client.state is EngineState.CLOSED)
    assert not service.is_ready
    assert ask(service, "ab").wait_final().error.code == "UNAVAILABLE"


def test_an_idle_model_that_is_unloaded_ends_its_engine(
    make_service: Callable[..., Service], ask: Callable[..., Any], eventually: Eventually
) -> None:
    service = make_service(drain_timeout_s=60.0, process=True)
    ask(service, "ab", max_tokens=1).wait_final()
    service.watch_unloads(lambda: True)
    eventually(lambda: service._client.state is EngineState.CLOSED)
    eventually(lambda: not any(thread.name == "metrics" for thread in threading.enumerate()))


def test_a_model_that_never_had_a_request_is_left_to_triton(
    make_service: Callable[..., Service],
) -> None:
    """Triton may not have taken notice yet that it is loaded."""
    asked: list[int] = []
    service = make_service()
    service.watch_unloads(lambda: not asked.append(0))
    time.sleep(1.2)
    assert asked == []
    assert service.is_ready
