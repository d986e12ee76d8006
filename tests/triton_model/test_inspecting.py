"""A request with the parameter `inspect` gets the engine's state, and only where it may."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Look = Callable[..., Any]

REFUSED = (
    "inspect is not allowed: the engine's option allow_inspect is false; set it to true in "
    "engine.json to show sequences and blocks to every client"
)


@pytest.fixture
def look(make_request: Callable[..., Any]) -> Iterator[Look]:
    """Ask a service for its engine's state; every sender must have one final, and no sins."""
    senders: list[Any] = []

    def send(service: Service, value: Any = True, **tensors: Any) -> Any:
        request = make_request({"inspect": value}, **tensors)
        senders.append(request.sender)
        service.accept(request)
        return request.sender

    yield send
    for sender in senders:
        sender.wait_final()
        assert sender.num_finals == 1
        assert sender.violations == []


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_an_idle_engine_answers_with_one_response(
    make_service: MakeService, look: Look, process: bool
) -> None:
    serving = make_service(allow_inspect=True, process=process)
    for value in (True, "true"):
        (response,) = look(serving, value).wait_final().responses
        state = json.loads(response.output("text_output"))
        assert state["device"]["states"] == "........"
        assert state["num_allocated_slots"] == 0


def test_a_busy_engine_answers_between_two_steps(
    make_service: MakeService, ask: Ask, look: Look
) -> None:
    serving = make_service(allow_inspect=True)
    streaming = ask(serving, "ab", stream=True, max_tokens=10**6)
    streaming.wait_for(lambda sender: len(sender.responses) > 1)
    (response,) = look(serving).wait_final().responses
    assert json.loads(response.output("text_output"))["device"]["states"] == "u......."
    assert streaming.num_finals == 0
    streaming.cancelled = True


@pytest.mark.parametrize(
    ("value", "tensors", "message"),
    [
        (False, {}, "inspect is False but must be true, or absent"),
        (1, {}, "inspect is 1 but must be true, or absent"),
        (True, {"text_input": "a"}, "inspect takes no tensors but the request has text_input"),
    ],
)
def test_a_wrong_question_is_refused(
    make_service: MakeService, look: Look, value: object, tensors: dict[str, str], message: str
) -> None:
    error = look(make_service(allow_inspect=True), value, **tensors).wait_final().error
    assert (error.code, error.reason) == ("INVALID_ARG", message)


def test_nobody_looks_where_it_is_not_allowed(make_service: MakeService, look: Look) -> None:
    error = look(make_service()).wait_final().error
    assert (error.code, error.reason) == ("INVALID_ARG", REFUSED)


def test_a_prompt_that_speaks_of_it_is_a_prompt(make_service: MakeService, ask: Ask) -> None:
    assert ask(make_service(), "inspect", max_tokens=1).wait_final().text == "inspecti"


def test_a_dead_engine_cannot_be_looked_at(
    make_service: MakeService, ask: Ask, look: Look, fake_engine: ModuleType
) -> None:
    serving = make_service(allow_inspect=True, process=True)
    ask(serving, "ab", max_tokens=10**6, seed=fake_engine.DIES).wait_final()
    assert look(serving).wait_final().error.code == "UNAVAILABLE"


def test_a_question_that_outlasts_the_service_is_answered_too(
    make_service: MakeService, look: Look
) -> None:
    serving = make_service(allow_inspect=True)
    serving.close()
    assert look(serving).wait_final().error.code == "UNAVAILABLE"
