"""Where the engine computes on the host's own cores, tokens are sent joined when there are many."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from octavo.engine_client import EngineClient, EngineDied, Event
from octavo.text.output_text import OutputText, TextDelta
from octavo.triton_model import response_writer
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]

ON_HOST = {"model": "on the host"}
FLAGS = {"stream": True, "return_num_output_tokens": True, "return_finish_reason": True}


@pytest.fixture
def tokens_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no joined token be sent before the end of its answer."""
    monkeypatch.setattr(response_writer, "FEW_RESPONSES", 0)
    monkeypatch.setattr(response_writer, "JOIN_S_PER_RESPONSE", 1e6)
    monkeypatch.setattr(response_writer, "MAX_JOIN_S", 1e6)


def counts(sender: Any) -> list[int]:
    return [response.output("num_output_tokens") for response in sender.responses]


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_the_first_and_the_last_response_wait_for_nobody(
    make_service: MakeService, ask: Ask
) -> None:
    service = make_service(**ON_HOST)
    senders = [ask(service, "abcd", max_tokens=40 + i, **FLAGS) for i in range(4)]
    assert [counts(sender.wait_final()) for sender in senders] == [[1, 39 + i] for i in range(4)]


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_joined_tokens_are_those_that_came_in_their_order(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(**ON_HOST), "abcd", max_tokens=10, **FLAGS).wait_final()
    assert [response.output("text_output") for response in sender.responses] == ["a", "bcdabcdab"]
    assert [response.output("finish_reason") for response in sender.responses] == ["", "length"]


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_a_cancellation_does_not_wait_with_the_tokens(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(**ON_HOST), "abcd", max_tokens=50_000, **FLAGS)
    sender.wait_for(lambda sender: sender.responses)
    sender.cancelled = True
    first, last = sender.wait_final().responses
    assert (first.output("text_output"), last.error.code) == ("a", "CANCELLED")


def test_no_token_waits_longer_than_the_bound(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_writer, "FEW_RESPONSES", 0)
    monkeypatch.setattr(response_writer, "JOIN_S_PER_RESPONSE", 1e6)
    # A step takes 2 ms and more, so 100 of them are ten times the bound and more.
    monkeypatch.setattr(response_writer, "MAX_JOIN_S", 0.02)
    sender = ask(make_service(**ON_HOST), "abcd", max_tokens=100, **FLAGS).wait_final()
    assert sum(counts(sender)) == 100
    assert 4 < len(sender.responses) < 50


def test_few_streams_do_not_wait_for_each_other(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_writer, "JOIN_S_PER_RESPONSE", 1e6)
    monkeypatch.setattr(response_writer, "MAX_JOIN_S", 1e6)
    sender = ask(make_service(**ON_HOST), "abcd", max_tokens=100, **FLAGS).wait_final()
    assert len(sender.responses) > 4


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_tokens_of_an_engine_on_a_device_never_wait(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "abcd", max_tokens=100, **FLAGS).wait_final()
    assert len(sender.responses) > 4


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_joined_tokens_are_sent_before_the_end_of_a_drain(
    make_service: MakeService, ask: Ask, pb_utils: Any
) -> None:
    service = make_service(**ON_HOST, drain_timeout_s=0.1)
    sender = ask(service, "abcd", max_tokens=50_000, **FLAGS)
    sender.wait_for(lambda sender: sender.responses)
    service.close()
    first, joined, last = sender.responses
    assert last.error.reason == "the server stops before the request is finished"
    num_made = pb_utils.MetricFamily.value("octavo_generation_tokens_total")
    assert num_made > 4
    assert [each.output("num_output_tokens") for each in (first, joined)] == [1, num_made - 1]
    assert joined.output("finish_reason") == ""


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_joined_tokens_are_sent_before_the_error_of_their_own_request(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(self: OutputText, *args: Any) -> TextDelta:
        pushed.append(args)
        if len(pushed) == 7:
            raise RuntimeError("no such token")
        return original(self, *args)

    pushed: list[Any] = []
    original = OutputText.push
    monkeypatch.setattr(OutputText, "push", push)
    sender = ask(make_service(**ON_HOST), "abcd", max_tokens=50_000, **FLAGS).wait_final()
    *answers, last = sender.responses
    assert [each.output("text_output") for each in answers] == ["a", "bcdab"]
    assert last.error.reason == "the tokens could not be turned into text"


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_joined_tokens_that_cannot_be_sent_end_in_one_error(
    make_service: MakeService, ask: Ask
) -> None:
    service = make_service(**ON_HOST, drain_timeout_s=0.1)
    sender = ask(service, "abcd", max_tokens=50_000, **FLAGS)
    sender.wait_for(lambda sender: sender.responses)
    sender.broken = True
    service.close()
    _, last = sender.responses
    assert last.error.reason == "the response could not be sent; the server's log says why"


@pytest.mark.usefixtures("tokens_wait_for_ever")
def test_a_dead_engine_takes_nothing_with_it_that_it_had_made(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the engine said is heard in one turn of the writer: its end stands behind it."""

    def poll(self: EngineClient, *args: Any, **options: Any) -> list[Event]:
        events.extend(original(self, *args, **options))
        if not any(isinstance(event, EngineDied) for event in events):
            return []
        heard = events.copy()
        events.clear()
        return heard

    service = make_service(**ON_HOST)
    events: list[Event] = []
    original = EngineClient.poll
    monkeypatch.setattr(EngineClient, "poll", poll)
    cut = ask(service, "abcd", max_tokens=50_000, **FLAGS)
    whole = ask(service, "abcd", max_tokens=3, **FLAGS)
    ask(service, "abcd", seed=fake_engine.STEP_FAILS)  # the engine runs two at a time
    (answer,) = whole.wait_final().responses
    assert (answer.output("text_output"), answer.output("finish_reason")) == ("abc", "length")
    answer, last = cut.wait_final().responses
    assert answer.output("text_output").startswith("abc")
    assert last.error.code == "UNAVAILABLE"
