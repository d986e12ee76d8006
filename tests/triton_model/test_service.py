"""Requests through service, writer and a fake engine; the `ask` fixture checks every final flag."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from octavo.engine_client import EngineState
from octavo.engine_host import EngineProcess
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model import response_writer, service
from octavo.triton_model.service import Service

MakeService = Callable[..., Service]
Ask = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]

BLOCKS_USED = "octavo_kv_blocks_used"


def _gauge(pb_utils: Any, name: str) -> float:
    return pb_utils.MetricFamily.series[name].values[-1]


def test_a_whole_answer_comes_in_one_response_behind_its_prompt(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), "abc", max_tokens=5).wait_final()
    assert [response.output("text_output") for response in sender.responses] == ["abcabcab"]


def test_a_stream_is_deltas_whose_sum_is_the_answer(make_service: MakeService, ask: Ask) -> None:
    flags = {
        f"return_{name}": True
        for name in ("token_ids", "finish_reason", "num_input_tokens", "num_output_tokens")
    }
    sender = ask(make_service(), "abc", stream=True, max_tokens=50, **flags).wait_final()
    assert sender.text == ("abc" * 17)[:50]
    outputs = [response.output for response in sender.responses]
    assert len(outputs) > 1
    assert all(output("text_output") for output in outputs)
    assert sum(output("num_output_tokens") for output in outputs) == 50
    assert {output("num_input_tokens") for output in outputs} == {3}
    assert [output("finish_reason") for output in outputs] == [""] * (len(outputs) - 1) + ["length"]
    token_ids = np.hstack([output("token_ids") for output in outputs])
    assert len(token_ids) == 50


def test_a_stream_that_includes_the_prompt_begins_with_it(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(
        make_service(), "abc", stream=True, exclude_input_in_output=False, max_tokens=4
    ).wait_final()
    assert sender.responses[0].output("text_output").startswith("abca")
    assert sender.text == "abcabca"


def test_a_prompt_of_ids_is_echoed_as_text_without_nul(
    make_service: MakeService, ask: Ask, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("x\0y")
    sender = ask(make_service(), input_ids=ids, max_tokens=1).wait_final()
    assert sender.text == "x\ufffdyx"


def test_messages_are_rendered_with_the_models_template(
    make_service: MakeService, ask: Ask
) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    sender = ask(
        make_service(), messages=messages, exclude_input_in_output=True, max_tokens=8
    ).wait_final()
    assert sender.text == "[user]hi"


def test_no_response_of_a_stream_ends_inside_a_character(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), "é👍你", stream=True, max_tokens=18).wait_final()
    texts = [response.output("text_output") for response in sender.responses]
    assert "".join(texts) == "é👍你é👍你"
    assert all(texts)


def test_a_stop_string_split_over_tokens_ends_the_answer_before_it(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    sender = ask(
        make_service(),
        "abcd",
        stream=True,
        stop="cda",
        max_tokens=150,
        return_finish_reason=True,
        return_num_output_tokens=True,
    ).wait_final()
    assert sender.text == "ab"
    assert sender.responses[-1].output("finish_reason") == "stop"
    assert sum(response.output("num_output_tokens") for response in sender.responses) == 5
    eventually(lambda: _gauge(pb_utils, BLOCKS_USED) == 0)


def test_a_stop_string_before_min_tokens_is_ordinary_text(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(
        make_service(), "abcd", exclude_input_in_output=True, stop="cd", min_tokens=6, max_tokens=50
    )
    assert sender.wait_final().text == "abcdab"


def test_a_stop_string_that_never_completes_is_sent_at_the_end(
    make_service: MakeService, ask: Ask
) -> None:
    sender = ask(make_service(), "abcd", stream=True, stop="bcX", max_tokens=3).wait_final()
    assert sender.text == "abc"


def test_a_stop_token_ends_the_answer_and_has_no_text(
    make_service: MakeService, ask: Ask, tokenizer: Tokenizer
) -> None:
    (stop_id,) = tokenizer.encode("c")
    sender = ask(
        make_service(),
        "abcd",
        stream=True,
        stop_token_ids=[stop_id],
        max_tokens=50,
        return_finish_reason=True,
    ).wait_final()
    assert sender.text == "ab"
    assert sender.responses[-1].output("finish_reason") == "stop"


def test_deltas_that_wait_behind_a_slow_send_are_joined(
    make_service: MakeService, ask: Ask, make_request: Callable[..., Any]
) -> None:
    slow = make_request(
        text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 150, "seed": 0}'
    )
    send = slow.sender.send

    def send_slowly(response: Any = None, flags: int = 0) -> None:
        time.sleep(0.05)
        send(response, flags)

    slow.sender.send = send_slowly
    make_service().accept(slow)
    slow.sender.wait_final()
    assert slow.sender.text == ("abcd" * 38)[:150]
    assert len(slow.sender.responses) < 30
    assert slow.sender.num_finals == 1


def test_a_streams_tokens_come_while_a_long_prompt_is_read(
    make_service: MakeService, ask: Ask
) -> None:
    serving = make_service()
    running = ask(serving, "ab", stream=True, max_tokens=150)
    long = ask(serving, "x" * 400_000)
    assert long.wait_final().error.reason == (
        "prompt has 400,000 tokens but max_model_len is 100,000, with room for the answer; "
        "shorten it or raise max_model_len in engine.json"
    )
    assert long.error.code == "INVALID_ARG"
    assert running.wait_final().text == "ab" * 75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids has 300 but token ids are 0"),
        ({"prompt": "a" * 100_000}, "prompt has 100,000 tokens but max_model_len is 100,000"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1.0 but must be"),
        ({"messages": "[]"}, r"messages is \[\] but must be a list of messages"),
        ({"input_ids": [300]}, "input_ids has 300 at position 0 but token ids are 0 to 299"),
        ({}, "the request has no prompt"),
        (
            {"prompt": "a", "n": 65},
            "n is 65 but max_num_seqs is 64; ask for fewer answers or raise",
        ),
    ],
)
def test_a_wrong_request_is_answered_and_disturbs_nobody(
    make_service: MakeService, ask: Ask, options: dict[str, Any], message: str
) -> None:
    serving = make_service()
    other = ask(serving, "ab", stream=True, max_tokens=40)
    sender = ask(serving, **options).wait_final()
    assert sender.error.code == "INVALID_ARG"
    with pytest.raises(AssertionError, match=f"^{message}"):
        raise AssertionError(sender.error.reason)
    assert other.wait_final().text == "ab" * 20


def test_an_unforeseen_error_is_internal_and_keeps_its_details_to_the_log(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(service, "admit", fail)
    error = ask(make_service(), "a").error
    assert error.code == "INTERNAL"
    assert "secret" not in error.reason


def test_an_error_of_the_engine_ends_its_request_alone_with_its_own_code(
    make_service: MakeService, ask: Ask, fake_engine: ModuleType
) -> None:
    serving = make_service()
    other = ask(serving, "ab", stream=True, max_tokens=40)
    for seed, code, message in [
        (fake_engine.ENDS_WITH_ERROR, "INTERNAL", "row failed"),
        (fake_engine.REFUSED, "INVALID_ARG", "this engine refuses the request"),
    ]:
        error = ask(serving, "a", seed=seed).wait_final().error
        assert (error.code, error.reason) == (code, message)
    assert other.wait_final().text == "ab" * 20


def test_a_cancelled_request_is_answered_and_gives_its_blocks_back(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    """The engine runs two at a time, so the third waits; each state is left alike."""
    serving = make_service()
    senders = [ask(serving, "abcd", stream=True, max_tokens=10**6) for _ in range(3)]
    whole = ask(serving, "abcd", max_tokens=10**6)
    senders[0].wait_for(lambda sender: len(sender.responses) > 1)
    for sender in [*reversed(senders), whole]:
        sender.cancelled = True
        sender.wait_final()
        assert sender.responses[-1].error.code == "CANCELLED"
    eventually(lambda: _gauge(pb_utils, BLOCKS_USED) == 0)
    assert _gauge(pb_utils, "octavo_num_requests_waiting") == 0
    assert ask(serving, "ab", max_tokens=1).wait_final().text == "aba"


def test_a_dead_engine_answers_every_request_at_once_and_comes_back(
    make_service: MakeService,
    ask: Ask,
    fake_engine: ModuleType,
    pb_utils: Any,
    eventually: Eventually,
) -> None:
    serving = make_service(process=True)
    assert serving.is_ready
    streaming = ask(serving, "ab", stream=True, max_tokens=10**6)
    streaming.wait_for(lambda sender: len(sender.responses) > 1)
    died_at = time.monotonic()
    fatal = ask(serving, "ab", max_tokens=10**6, seed=fake_engine.DIES)
    waiting = ask(serving, "ab", max_tokens=10**6)
    for sender in (streaming, fatal, waiting):
        error = sender.wait_final().responses[-1].error
        assert error.code == "UNAVAILABLE"
        assert "signal 9" in error.reason
    assert time.monotonic() - died_at < 1.0
    assert not serving.is_ready
    eventually(lambda: _gauge(pb_utils, "octavo_engine_up") == 0)
    while_dead = ask(serving, "ab").wait_final().error
    assert while_dead.code == "UNAVAILABLE"
    eventually(lambda: serving.is_ready)
    assert ask(serving, "ab", max_tokens=1).wait_final().text == "aba"
    eventually(lambda: _gauge(pb_utils, "octavo_engine_up") == 1)


def test_a_sender_that_raises_costs_only_its_own_request(
    make_service: MakeService, ask: Ask, pb_utils: Any, eventually: Eventually
) -> None:
    serving = make_service()
    broken = ask(serving, "ab", stream=True, max_tokens=10**6)
    broken.broken = True
    other = ask(serving, "ab", stream=True, max_tokens=40)
    broken.wait_final()
    assert broken.responses[-1].error.code == "INTERNAL"
    assert other.wait_final().text == "ab" * 20
    eventually(lambda: _gauge(pb_utils, BLOCKS_USED) == 0)


def test_a_sender_that_cannot_be_asked_costs_only_its_own_request(
    make_service: MakeService, ask: Ask
) -> None:
    serving = make_service()
    broken = ask(serving, "ab", stream=True, max_tokens=10**6)

    def fail() -> bool:
        raise RuntimeError("no connection")

    broken.is_cancelled = fail
    assert broken.wait_final().responses[-1].error.code == "INTERNAL"
    assert ask(serving, "ab", max_tokens=1).wait_final().text == "aba"


def test_a_fault_of_the_writer_itself_ends_requests_and_not_the_writer(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = make_service()
    faults = iter([RuntimeError("a bug")])

    def handle(self: Any, event: Any) -> None:
        for fault in faults if getattr(event, "outputs", ()) else ():
            raise fault
        original(self, event)

    original = response_writer.ResponseWriter._handle
    monkeypatch.setattr(response_writer.ResponseWriter, "_handle", handle)
    assert ask(serving, "ab", max_tokens=10**6).wait_final().error.code == "INTERNAL"
    assert ask(serving, "ab", max_tokens=1).wait_final().text == "aba"


def test_closing_lets_running_requests_finish(make_service: MakeService, ask: Ask) -> None:
    serving = make_service(drain_timeout_s=10.0)
    sender = ask(serving, "ab", stream=True, max_tokens=100)
    serving.close()
    assert sender.text == "ab" * 50


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_closing_ends_the_rest_when_the_time_is_up(
    make_service: MakeService, ask: Ask, process: bool
) -> None:
    threads = set(threading.enumerate())
    serving = make_service(process=process, drain_timeout_s=0.05)
    senders = [ask(serving, "ab", stream=True, max_tokens=10**6, seed=0) for _ in range(3)]
    started = time.monotonic()
    serving.close()
    assert time.monotonic() - started < 2.0
    for sender in senders:
        assert sender.responses[-1].error.code == "UNAVAILABLE"
    assert set(threading.enumerate()) <= threads
    assert not serving.is_ready
    assert serving._client.state is EngineState.CLOSED


def test_a_server_that_is_told_to_stop_ends_what_runs_too_long(
    make_service: MakeService, ask: Ask
) -> None:
    """SIGTERM reaches the engine process, for Triton tells a model nothing while requests run."""
    serving = make_service(process=True, drain_timeout_s=0.5)
    long = ask(serving, "ab", stream=True, max_tokens=10**6)
    long.wait_for(lambda sender: len(sender.responses) > 1)
    engine = serving._client._engine
    assert engine is not None
    assert isinstance(engine.host, EngineProcess)
    os.kill(engine.host.pid, signal.SIGTERM)
    short = ask(serving, "ab", max_tokens=20)
    assert short.wait_final().text == "ab" * 11
    error = long.wait_final().responses[-1].error
    assert error.code == "UNAVAILABLE"
    assert error.reason == "the server stops before the request is finished"
    assert not serving.is_ready


def test_after_closing_requests_are_refused(make_service: MakeService, ask: Ask) -> None:
    serving = make_service()
    serving.close()
    error = ask(serving, "ab").error
    assert (error.code, error.reason) == (
        "UNAVAILABLE",
        "the model is being unloaded and takes no more requests",
    )
