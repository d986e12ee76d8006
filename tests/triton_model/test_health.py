"""A request with the parameter `health` is told how the engine is, whatever the engine does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from octavo.engine_host import EngineProcess
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Look = Callable[[Service], dict[str, Any]]
Eventually = Callable[[Callable[[], bool]], None]

SOUND = {"engine": "ready", "is_draining": False, "is_frozen": False, "num_live_requests": 0}
ENDLESS = {"stream": True, "max_tokens": 10**6}


@pytest.fixture
def look(make_request: Callable[..., Any]) -> Iterator[Look]:
    """Ask a service for its engine's health; every sender must have one final, and no sins."""
    senders: list[Any] = []

    def send(service: Service) -> dict[str, Any]:
        request = make_request({"health": True})
        senders.append(request.sender)
        service.accept(request)
        (response,) = request.sender.wait_final().responses
        return dict(json.loads(response.output("text_output")))

    yield send
    for sender in senders:
        assert (sender.num_finals, sender.violations) == (1, [])


def engine_pid(service: Service) -> int:
    link = service._client._engine
    assert link is not None
    assert isinstance(link.host, EngineProcess)
    return link.host.pid


def test_an_idle_and_a_busy_engine_are_sound(
    make_service: MakeService, ask: Ask, look: Look
) -> None:
    service = make_service()
    assert look(service) == SOUND
    streaming = ask(service, "ab", **ENDLESS)
    streaming.wait_for(lambda sender: bool(sender.responses))
    assert look(service) == {**SOUND, "num_live_requests": 1}
    assert service.is_ready
    streaming.cancelled = True


def test_a_full_queue_does_not_keep_the_answer_back(
    make_service: MakeService, ask: Ask, look: Look
) -> None:
    service = make_service(max_num_queued_requests=1)
    senders = [ask(service, "ab", **ENDLESS) for _ in range(3)]
    assert ask(service, "ab", max_tokens=1).wait_final().error.code == "UNAVAILABLE"
    assert look(service) == {**SOUND, "num_live_requests": 3}
    for sender in senders:
        sender.cancelled = True


def test_a_dead_engine_is_not_ready_until_it_is_back(
    make_service: MakeService, ask: Ask, look: Look, fake_engine: ModuleType, eventually: Eventually
) -> None:
    service = make_service(process=True)
    ask(service, "ab", seed=fake_engine.DIES).wait_final()
    assert look(service) == {**SOUND, "engine": "restarting"}
    assert not service.is_ready
    eventually(lambda: service.is_ready)
    assert look(service) == SOUND


def test_an_engine_that_is_given_up_says_so(
    make_service: MakeService, ask: Ask, look: Look, fake_engine: ModuleType, eventually: Eventually
) -> None:
    service = make_service(first_delay_s=0.001)
    for _ in range(6):
        eventually(lambda: service.is_ready)
        ask(service, "ab", seed=fake_engine.STEP_FAILS).wait_final()
    assert look(service) == {**SOUND, "engine": "failed"}
    assert not service.is_ready


def test_a_frozen_engine_is_not_ready_and_then_restarted(
    make_service: MakeService, ask: Ask, look: Look, eventually: Eventually
) -> None:
    service = make_service(process=True, step_timeout_s=1.0)
    streaming = ask(service, "ab", **ENDLESS)
    streaming.wait_for(lambda sender: bool(sender.responses))
    os.kill(engine_pid(service), signal.SIGSTOP)
    eventually(lambda: not service.is_ready)
    assert look(service) == {**SOUND, "is_frozen": True, "num_live_requests": 1}
    streaming.wait_final()
    assert "UNAVAILABLE: the engine did not answer within step_timeout_s (1 s)" in str(
        streaming.responses[-1].error
    )
    eventually(lambda: service.is_ready)


def test_a_model_that_drains_is_not_ready(
    make_service: MakeService, ask: Ask, look: Look, eventually: Eventually
) -> None:
    service = make_service(process=True, drain_timeout_s=60.0)
    streaming = ask(service, "ab", **ENDLESS)
    streaming.wait_for(lambda sender: bool(sender.responses))
    os.kill(engine_pid(service), signal.SIGTERM)
    eventually(lambda: not service.is_ready)
    assert look(service) == {**SOUND, "is_draining": True, "num_live_requests": 1}
    streaming.cancelled = True


def test_the_question_is_no_request_that_anybody_is_told_of(
    make_service: MakeService, look: Look
) -> None:
    records: list[Any] = []
    service = make_service(reporters=(records.append,))
    look(service)
    service.close()
    assert records == []
