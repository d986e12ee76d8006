"""When a request is told of whose answer a stop string ended before the engine knew."""

from __future__ import annotations

import pytest

from octavo.errors import EngineDead
from octavo.request import FinishReason, Request, SequenceTiming, TokenOutput
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.exchange import Arrival, ResponseOptions
from octavo.triton_model.live_request import LiveRequest
from octavo.triton_model.reporting import Reports
from octavo.triton_model.request_record import RequestRecord

TIMING = SequenceTiming(queue_s=0.5)


@pytest.fixture
def told() -> list[RequestRecord]:
    return []


@pytest.fixture
def reports(told: list[RequestRecord]) -> Reports:
    return Reports((told.append,))


@pytest.fixture
def live(tokenizer: Tokenizer) -> LiveRequest:
    """Return a request of two answers, of which the first has ended by a stop string."""
    request = Request("7", (97, 98), SamplingParams(n=2, max_tokens=9, stop=("c",)), 1.0)
    live = LiveRequest(request, Arrival(1.0), ResponseOptions(), _Sender(), tokenizer, "")
    assert live.take(TokenOutput("7", tuple(tokenizer.encode("c"))), 2.0).is_cut
    return live


class _Sender:
    def send(self, response: object = None, flags: int = 0) -> None:
        raise AssertionError("nothing is sent here")

    def is_cancelled(self) -> bool:
        return False


def _last(index: int) -> TokenOutput:
    return TokenOutput("7", (), (), FinishReason.STOP, index=index, timing=TIMING)


def test_it_is_told_when_the_engine_has_timed_all_its_answers(
    reports: Reports, live: LiveRequest, told: list[RequestRecord]
) -> None:
    reports.end(live, FinishReason.STOP)
    reports.take_late(_last(0))
    assert told == []
    reports.take_late(_last(1))
    reports.take_late(_last(1))
    reports.wait_no_longer()
    (record,) = told
    assert (record.timing, record.finish_reason) == (TIMING, FinishReason.STOP)
    assert (record.arrival_s, record.first_token_s) == (1.0, 2.0)
    assert (record.num_prompt_tokens, record.num_generated_tokens) == (2, 1)


def test_it_is_told_without_timing_when_the_engine_is_gone(
    reports: Reports, live: LiveRequest, told: list[RequestRecord]
) -> None:
    reports.end(live, FinishReason.STOP)
    reports.wait_no_longer()
    reports.take_late(_last(0))
    (record,) = told
    assert record.timing is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_who_the_engine_says_nothing_more_of_is_told_at_once(
    reports: Reports, live: LiveRequest, told: list[RequestRecord], reason: FinishReason
) -> None:
    error = EngineDead("the engine is dead")
    reports.end(live, reason, error)
    (record,) = told
    assert (record.error, record.was_refused, record.timing) == (error, False, None)


def test_who_came_while_there_was_no_engine_was_refused(
    reports: Reports, live: LiveRequest, told: list[RequestRecord]
) -> None:
    error = EngineDead("the engine is restarting")
    reports.end(live, FinishReason.ERROR, error, was_refused=True)
    reports.refuse(Arrival(3.0, "mine"), error)
    assert [record.was_refused for record in told] == [True, True]
    assert (told[1].request_id, told[1].client_request_id) == ("", "mine")
