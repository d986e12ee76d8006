from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.engine_client import EngineClient, EngineDied, EngineState
from octavo.engine_host import EngineProcess, find_interpreter
from octavo.engine_messages import EngineReady, StopRequested
from octavo.errors import ConfigError, EngineDead, InvalidRequest, QueueFull
from octavo.request import FinishReason, Request, StepOutput, TokenOutput
from octavo.sampling_params import SamplingParams

MakeClient = Callable[..., EngineClient]

both_hosts = pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])


def _request(name: str, max_tokens: int = 3, **params: Any) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(max_tokens=max_tokens, seed=0, **params))


def _poll_until(client: EngineClient, condition: Callable[[Any], bool]) -> list[Any]:
    events: list[Any] = []
    deadline = time.monotonic() + 10.0
    while not any(condition(event) for event in events):
        assert time.monotonic() < deadline, f"only these came: {events}"
        events += client.poll(0.1)
    return events


def _outputs(events: list[Any]) -> list[TokenOutput]:
    return [output for e in events if isinstance(e, StepOutput) for output in e.outputs]


def _has_ended(event: Any) -> bool:
    return isinstance(event, StepOutput) and any(o.finish_reason for o in event.outputs)


def _let_it_settle(client: EngineClient) -> None:
    """An idle engine says its figures once, sooner or later."""
    deadline = time.monotonic() + 10.0
    while client.poll(0.3):
        assert time.monotonic() < deadline, "it says more and more"


def _pid(client: EngineClient) -> int:
    assert client._engine is not None
    assert isinstance(client._engine.host, EngineProcess)
    return client._engine.host.pid


def _kill(client: EngineClient) -> None:
    os.kill(_pid(client), signal.SIGKILL)


@both_hosts
def test_a_request_comes_back_token_by_token(make_client: MakeClient, process: bool) -> None:
    client = make_client(process=process)
    assert client.wait_ready().vocab_size == 300
    client.submit(_request("a"))
    outputs = _outputs(_poll_until(client, _has_ended))
    assert [output.token_ids for output in outputs] == [(5,), (6,), (7,)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]


@both_hosts
def test_an_engine_that_cannot_start_says_why(make_client: MakeClient, process: bool) -> None:
    client = make_client(process=process, model="unloadable")
    with pytest.raises(ConfigError, match=r"^the checkpoint is damaged$"):
        client.wait_ready()
    assert client.state is EngineState.FAILED


def test_an_unexpected_failure_at_start_names_its_type(make_client: MakeClient) -> None:
    with pytest.raises(ConfigError, match=r"^RuntimeError: out of memory$"):
        make_client(model="crashing").wait_ready()


def test_a_request_the_engine_refuses_ends_alone(
    make_client: MakeClient, fake_engine: ModuleType
) -> None:
    client = make_client()
    client.wait_ready()
    refused = Request("b", (1,), SamplingParams(max_tokens=1, seed=fake_engine.REFUSED))
    client.submit(_request("a", max_tokens=20))
    client.submit(refused)
    outputs = _outputs(_poll_until(client, lambda e: "a" in _ended_ids(e)))
    (answer,) = [output for output in outputs if output.request_id == "b"]
    assert answer.finish_reason is FinishReason.ERROR
    assert isinstance(answer.error, InvalidRequest)
    assert str(answer.error) == "this engine refuses the request"
    assert len(outputs) == 21


def _ended_ids(event: Any) -> list[str]:
    return [o.request_id for o in _outputs([event]) if o.finish_reason]


def test_a_refusal_does_not_wait_for_another_request(
    make_client: MakeClient, fake_engine: ModuleType
) -> None:
    client = make_client()
    client.wait_ready()
    client.submit(Request("a", (1,), SamplingParams(max_tokens=1, seed=fake_engine.REFUSED)))
    _poll_until(client, _has_ended)


def test_a_full_queue_refuses_before_the_next_step_and_others_run_on(
    make_client: MakeClient,
) -> None:
    client = make_client(max_num_queued_requests=1)
    client.wait_ready()
    for name in "abcd":
        client.submit(_request(name, max_tokens=50))
    events = _poll_until(client, lambda e: "d" in _ended_ids(e))
    (refusal,) = [output for output in _outputs(events) if output.request_id == "d"]
    assert isinstance(refusal.error, QueueFull)
    assert len(_outputs(events)) < 100, "it came with the last token of another request"
    rest = _outputs(_poll_until(client, lambda e: "c" in _ended_ids(e)))
    assert {output.finish_reason for output in rest} == {None, FinishReason.LENGTH}


def test_an_answer_that_is_stopped_from_outside_says_where_its_time_went(
    make_client: MakeClient,
) -> None:
    client = make_client()
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000, n=2))
    _poll_until(client, lambda e: isinstance(e, StepOutput) and e.outputs)
    client.abort("a", FinishReason.STOP, 1)
    (last,) = [o for o in _outputs(_poll_until(client, _has_ended)) if o.finish_reason]
    assert (last.index, last.token_ids, last.finish_reason) == (1, (), FinishReason.STOP)
    assert last.timing is not None
    (step,) = [e for e in client.poll(5.0) if isinstance(e, StepOutput)][:1]
    assert [output.index for output in step.outputs] == [0]


def test_a_request_that_is_aborted_outputs_nothing_more(make_client: MakeClient) -> None:
    client = make_client()
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000, n=2))
    client.submit(_request("b", max_tokens=10))
    _poll_until(client, lambda e: isinstance(e, StepOutput) and e.outputs)
    client.abort("a", FinishReason.ABORT)
    outputs = _outputs(_poll_until(client, lambda e: "b" in _ended_ids(e)))
    assert {output.finish_reason for output in outputs if output.request_id == "a"} <= {None}


def test_figures_are_right_at_idle_after_an_abort(make_client: MakeClient) -> None:
    client = make_client()
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000))
    _poll_until(client, lambda e: isinstance(e, StepOutput) and e.stats.num_running == 1)
    client.abort("a", FinishReason.ABORT)
    events = _poll_until(client, lambda e: isinstance(e, StepOutput) and not e.stats.num_running)
    assert events[-1].stats.num_free_blocks == events[-1].stats.num_blocks


def test_a_killed_process_is_noticed_at_once_and_started_again(make_client: MakeClient) -> None:
    client = make_client(process=True)
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000))
    _poll_until(client, lambda e: isinstance(e, StepOutput))
    killed_at = time.monotonic()
    _kill(client)
    events = _poll_until(client, lambda e: isinstance(e, EngineDied))
    assert time.monotonic() - killed_at < 0.5
    assert events[-1].message == (
        "engine process died (signal 9, SIGKILL); it is being started again, "
        "send the request again later"
    )
    assert client.state is EngineState.RESTARTING
    with pytest.raises(EngineDead, match=r"^the engine is restarting after: engine process died"):
        client.submit(_request("b"))
    _poll_until(client, lambda e: isinstance(e, EngineReady))
    client.submit(_request("c"))
    assert _ended_ids(_poll_until(client, _has_ended)[-1]) == ["c"]


def test_an_engine_that_dies_while_the_server_stops_is_not_started_again(
    make_client: MakeClient,
) -> None:
    client = make_client(process=True)
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000))
    _poll_until(client, lambda e: isinstance(e, StepOutput))
    os.kill(_pid(client), signal.SIGTERM)
    _poll_until(client, lambda e: isinstance(e, StopRequested))
    _kill(client)
    events = _poll_until(client, lambda e: isinstance(e, EngineDied))
    assert events[-1].message.endswith("while the server stops")
    assert client.state is EngineState.FAILED


def test_a_step_that_raises_ends_the_engine_with_its_reason(
    make_client: MakeClient, fake_engine: ModuleType
) -> None:
    client = make_client()
    client.wait_ready()
    client.submit(Request("a", (1,), SamplingParams(max_tokens=1, seed=fake_engine.STEP_FAILS)))
    events = _poll_until(client, lambda e: isinstance(e, EngineDied))
    assert events[-1].message.startswith(
        "the engine failed (RuntimeError), its log says why; it is being started again"
    )
    _poll_until(client, lambda e: isinstance(e, EngineReady))


def test_restarts_are_bounded_and_pause_longer_each_time(
    make_client: MakeClient, fake_engine: ModuleType
) -> None:
    client = make_client(first_delay_s=0.01)
    client.wait_ready()
    deaths = 0
    started = time.monotonic()
    while client.state is not EngineState.FAILED:
        assert time.monotonic() - started < 10.0, f"only {deaths} deaths"
        if client.state is EngineState.READY:
            client.submit(Request("a", (1,), SamplingParams(seed=fake_engine.STEP_FAILS)))
        deaths += sum(isinstance(event, EngineDied) for event in client.poll(0.1))
    assert deaths == 6
    assert time.monotonic() - started > 0.01 * (2**5 - 1)
    with pytest.raises(
        EngineDead, match=r"^the engine is failed after: the engine failed \(RuntimeError\)"
    ):
        client.submit(_request("b"))


def _poll_waiting(client: EngineClient, condition: Callable[[], bool]) -> list[Any]:
    """Poll as the owner of live requests does."""
    events: list[Any] = []
    deadline = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline:
        events += client.poll(0.02, is_waited_for=True)
    return events


def test_a_frozen_engine_is_killed_after_the_step_timeout_and_started_again(
    make_client: MakeClient,
) -> None:
    client = make_client(process=True, step_timeout_s=1.0, first_delay_s=0.01)
    client.wait_ready()
    client.submit(_request("a", max_tokens=10_000))
    _poll_until(client, lambda e: isinstance(e, StepOutput))
    pid = _pid(client)
    os.kill(pid, signal.SIGSTOP)
    for name in range(100):  # more than its connection holds: the thread that writes is stuck too
        client.submit(Request(str(name), tuple(range(10_000)), SamplingParams(seed=0)))
    stopped_at = time.monotonic()
    _poll_waiting(client, lambda: client.is_frozen)
    assert client.state is EngineState.READY
    events = _poll_waiting(client, lambda: client.state is not EngineState.READY)
    assert 0.9 < time.monotonic() - stopped_at < 3.0
    assert events[-1].message == (
        "the engine did not answer within step_timeout_s (1 s) and was killed; "
        "it is being started again, send the request again later"
    )
    assert not Path(f"/proc/{pid}").exists()
    assert not client.is_frozen
    _poll_waiting(client, lambda: client.state is EngineState.READY)
    assert sum(thread.name == "engine-writer" for thread in threading.enumerate()) == 1


def test_an_engine_that_nothing_is_asked_of_may_be_silent(make_client: MakeClient) -> None:
    client = make_client(process=True, step_timeout_s=1.0)
    client.wait_ready()
    _let_it_settle(client)
    os.kill(_pid(client), signal.SIGSTOP)
    for _ in range(6):
        assert client.poll(0.3) == []
    assert not client.is_frozen
    os.kill(_pid(client), signal.SIGCONT)  # or its end would be waited for


def test_time_in_which_the_owner_itself_stood_still_is_not_the_engines_silence(
    make_client: MakeClient,
) -> None:
    client = make_client(process=True, step_timeout_s=2.0)
    client.wait_ready()
    _let_it_settle(client)
    assert client.poll(1.5, is_waited_for=True) == []
    assert client._engine is not None
    assert client._engine.silent_s == 1.0


def test_a_host_that_cannot_be_started_counts_as_a_death(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(process=True, first_delay_s=0.01)
    client.wait_ready()

    def fail() -> EngineProcess:
        raise OSError("too many processes")

    monkeypatch.setattr(client, "_start_host", fail)
    _kill(client)
    events = _poll_until(client, lambda e: "reload the model" in getattr(e, "message", ""))
    assert len(events) == 6
    assert client.state is EngineState.FAILED


def test_wake_ends_a_poll_from_another_thread(make_client: MakeClient) -> None:
    client = make_client()
    client.wait_ready()
    client.wake()
    started = time.monotonic()
    assert client.poll(5.0) == []
    assert time.monotonic() - started < 1.0


def test_submitting_long_prompts_to_a_busy_engine_does_not_block(make_client: MakeClient) -> None:
    client = make_client(process=True)
    client.wait_ready()
    prompt = tuple(range(250_000))
    started = time.monotonic()
    for index in range(8):
        client.submit(Request(str(index), prompt, SamplingParams(max_tokens=1, seed=0)))
    assert time.monotonic() - started < 0.05
    events = _poll_until(client, lambda event: "7" in _ended_ids(event))
    ended = [name for event in events for name in _ended_ids(event)]
    assert ended == [str(index) for index in range(8)]


@both_hosts
def test_close_ends_a_busy_engine_that_nobody_reads(make_client: MakeClient, process: bool) -> None:
    client = make_client(process=process)
    client.wait_ready()
    for name in "ab":
        client.submit(_request(name, max_tokens=10**9))
    time.sleep(0.3)
    started = time.monotonic()
    client.close(5.0)
    assert time.monotonic() - started < 2.0
    assert client.state is EngineState.CLOSED
    client.wake()


def test_the_engine_process_ends_with_its_owner() -> None:
    """A parent that is killed leaves no engine behind, idle or busy."""
    program = (
        "import sys, time\n"
        "from octavo.config import EngineConfig\n"
        "from octavo.engine_host import EngineProcess\n"
        "host = EngineProcess(EngineConfig(model='fake'), [sys.executable, sys.argv[1]])\n"
        "host.connection.recv()\n"
        "print(host.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    fake = Path(__file__).with_name("fake_engine.py")
    with subprocess.Popen(
        [find_interpreter(), "-c", program, fake], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline, "the engine process outlives its owner"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_an_idle_engine_uses_no_processor(make_client: MakeClient) -> None:
    client = make_client(process=True)
    client.wait_ready()
    time.sleep(1.2)  # past the check of an idle engine
    before = _cpu_ticks(_pid(client))
    time.sleep(0.5)
    assert _cpu_ticks(_pid(client)) - before <= 1


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
