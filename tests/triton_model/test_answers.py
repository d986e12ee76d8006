"""Several answers to one prompt: every response has an element for each; answer i of the fake
engine begins with the prompt's i-th token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

FLAGS = {
    f"return_{name}": True
    for name in ("token_ids", "finish_reason", "num_input_tokens", "num_output_tokens")
}


def _texts(sender: Any) -> list[str]:
    """Return each answer's text, joined over the responses."""
    columns = zip(*(response.output("text_output") for response in sender.responses), strict=True)
    return ["".join(column) for column in columns]


def test_all_answers_come_in_one_response_each_behind_the_prompt(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), "abc", n=3, max_tokens=4, **FLAGS).wait_final()
    (response,) = sender.responses
    assert response.output("text_output") == ["abcabca", "abcbcab", "abccabc"]
    assert response.output("finish_reason") == ["length"] * 3
    assert response.output("num_output_tokens") == [4, 4, 4]
    assert len(response.output("token_ids")) == 12
    assert response.output("num_input_tokens") == 3


def test_token_ids_follow_each_other_in_the_order_of_answers(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), input_ids=[10, 20, 30], n=2, max_tokens=2, **FLAGS).wait_final()
    (response,) = sender.responses
    assert response.output("token_ids") == [10, 20, 20, 30]
    assert response.output("num_output_tokens") == [2, 2]


def test_deltas_of_all_answers_add_up(make_service: MakeService, ask: Ask) -> None:
    sender = ask(make_service(), "abcd", n=3, max_tokens=20, stream=True, **FLAGS).wait_final()
    assert _texts(sender) == ["abcd" * 5, "bcda" * 5, "cdab" * 5]
    assert len(sender.responses) > 1
    counts = [response.output("num_output_tokens") for response in sender.responses]
    assert [sum(column) for column in zip(*counts, strict=True)] == [20, 20, 20]
    assert all(any(response.output("text_output")) for response in sender.responses)


def test_an_ended_answer_repeats_its_reason_while_others_run(
    make_service: MakeService, ask: Ask
) -> None:
    """The engine runs two at a time, so the third answer begins when another has ended."""
    sender = ask(make_service(), "abcd", n=3, max_tokens=20, stream=True, **FLAGS).wait_final()
    reasons = [response.output("finish_reason") for response in sender.responses]
    assert reasons[0] == ["", "", ""]
    assert ["length", "length", ""] in reasons
    assert reasons[-1] == ["length"] * 3
    texts = [response.output("text_output") for response in sender.responses]
    assert {text[0] for text, reason in zip(texts, reasons, strict=True) if reason[0]} <= {"", "d"}


def test_the_prompt_stands_before_each_answer_of_the_first_response_of_a_stream(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(
        make_service(), "abc", n=3, max_tokens=4, stream=True, exclude_input_in_output=False
    ).wait_final()
    assert all(text.startswith("abc") for text in sender.responses[0].output("text_output"))
    assert _texts(sender) == ["abcabca", "abcbcab", "abccabc"]


def test_a_stop_string_ends_its_own_answer_alone(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    sender = ask(
        make_service(), "abcdefgh", n=3, stop="fgh", max_tokens=7, stream=True, **FLAGS
    ).wait_final()
    assert _texts(sender) == ["abcdefg", "bcde", "cde"]
    assert sender.responses[-1].output("finish_reason") == ["length", "stop", "stop"]
    eventually(lambda: pb_utils.MetricFamily.series["octavo_kv_blocks_used"].values[-1] == 0)


def test_an_answer_goes_on_after_a_stop_string_ended_another(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), "abcd", n=2, stop="ab", max_tokens=40, **FLAGS)
    (response,) = sender.wait_final().responses
    assert response.output("text_output") == ["abcd", "abcdbcd"]
    assert response.output("finish_reason") == ["stop", "stop"]
    assert response.output("num_output_tokens") == [2, 5]


def test_cancelling_ends_all_answers(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    sender = ask(make_service(), "abcd", n=4, max_tokens=10**6, stream=True)
    sender.wait_for(lambda sender: len(sender.responses) > 1)
    sender.cancelled = True
    assert sender.wait_final().responses[-1].error.code == "CANCELLED"
    eventually(lambda: pb_utils.MetricFamily.series["octavo_kv_blocks_used"].values[-1] == 0)


def test_an_error_ends_all_answers_with_one_final_response(
    make_service: MakeService, ask: Ask, fake_engine: Any
) -> None:
    error = ask(make_service(), "ab", n=3, seed=fake_engine.ENDS_WITH_ERROR).wait_final().error
    assert (error.code, error.reason) == ("INTERNAL", "row failed")


@pytest.mark.parametrize("n", [1, 64])
def test_as_many_answers_as_run_at_once_are_allowed(
    make_service: MakeService, ask: Ask, n: int
) -> None:
    sender = ask(make_service(), "ab", n=n, max_tokens=1, return_num_output_tokens=True)
    assert sender.wait_final().responses[-1].output("num_output_tokens") == (
        [1] * n if n > 1 else 1
    )
