"""Where the engine computes on the host's own cores, tokens are sent joined when there are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
