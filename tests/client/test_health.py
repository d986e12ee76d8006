"""`octavo health` against a scripted server: what is alive, what is ready, and what is neither."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest
from click.testing import CliRunner

from octavo_client import AsyncClient, EngineHealth, ServerError
from octavo_client.cli_options import Connection
from octavo_client.codec import encode_health
from octavo_client.health_command import find_fault, health

SOUND = {"engine": "ready", "is_draining": False, "is_frozen": False, "num_live_requests": 0}
TOKEN = r"octavo at [\d.:]+ generated a token in \d+\.\d+ s\n"


@pytest.fixture
def run(server):
    return lambda *args: CliRunner().invoke(health, ["--url", server.url, *args])


@pytest.fixture
def says(server):
    """Return a function that sets what the server says of its engine, and to a prompt."""

    def play(*steps, **values):
        answer = server.last(json.dumps({**SOUND, **values, "new": 1}))
        steps = steps or (server.last("o", 1),)
        server.script = lambda request: steps if "text_input" in request else (answer,)

    return play


def test_the_question_is_a_parameter_without_tensors():
    request = encode_health("octavo")
    assert request.parameters["health"].bool_param is True
    assert (request.model_name, len(request.inputs)) == ("octavo", 0)


def test_both_clients_read_the_answer(server, client, says):
    says(engine="restarting", num_live_requests=3)

    async def ask():
        async with AsyncClient(server.url) as other:
            return await other.engine_health(timeout_s=5)

    assert client.engine_health(timeout_s=5) == EngineHealth("restarting", False, False, 3)
    assert asyncio.run(ask()) == client.engine_health()


def test_another_answer_is_the_servers_fault(server, client):
    server.plays(server.last("hello"))
    with pytest.raises(ServerError, match="'hello' does not say how the engine is"):
        client.engine_health(timeout_s=5)


def test_without_a_probe_a_token_in_time_is_exit_code_0(server, run):
    result = run()
    assert result.exit_code == 0
    assert re.fullmatch("ok: " + TOKEN, result.stdout)
    assert [json.loads(r["sampling_parameters"])["max_tokens"] for r in server.requests] == [1]
    server.plays(server.fail("INVALID_ARGUMENT", "no"))
    assert run().exit_code == 1
    server.plays(server.HANG)
    result = run("--timeout", "0.1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not finished within 0.1 s" in result.stderr


@pytest.mark.parametrize("probe", ["live", "ready"])
def test_an_idle_engine_has_to_make_a_token(server, run, says, probe):
    says()
    result = run(f"--{probe}")
    assert result.exit_code == 0
    assert re.fullmatch(f"{probe}: {TOKEN}", result.stdout)
    says(server.HANG)
    result = run(f"--{probe}", "--timeout", "0.3")
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        ({"num_live_requests": 1}, "is at work on 1 request"),
        ({"num_live_requests": 5000, "is_frozen": True}, "is at work on 5,000 requests"),
        ({"engine": "restarting"}, "is restarting its engine by itself"),
        ({"is_draining": True, "num_live_requests": 2}, "stops, with 2 requests left"),
        ({"is_draining": True, "engine": "failed"}, "stops, with 0 requests left"),
    ],
)
def test_what_heals_by_itself_or_is_at_work_is_alive_without_a_token(
    server, run, says, state, finding
):
    says(server.HANG, **state)
    result = run("--live")
    assert (result.exit_code, result.stdout) == (0, f"live: octavo at {server.url} {finding}\n")


def test_a_full_queue_is_alive_but_not_ready(server, run, says):
    says(server.refuse("UNAVAILABLE: 3 requests wait"))
    assert run("--live").stdout.endswith("answers that 3 requests wait\n")
    result = run("--ready")
    assert (result.exit_code, result.stderr) == (1, "Error: 3 requests wait\n")


def test_an_engine_that_was_given_up_is_not_alive(run, says):
    says(engine="failed")
    result = run("--live")
    assert result.exit_code == 1
    assert result.stderr == "Error: the engine died too often and is not started again\n"


@pytest.mark.parametrize("probe", ["live", "ready"])
@pytest.mark.parametrize(
    "message", ["Stub process 'octavo_0_0' is not healthy.", "model 'octavo' is not ready"]
)
def test_a_dead_stub_and_a_model_that_is_not_loaded_are_neither(server, run, probe, message):
    server.plays(server.refuse(message))
    assert run(f"--{probe}").exit_code == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"engine": "restarting"}, "restarting"),
        ({"engine": "failed"}, "failed"),
        ({"is_draining": True}, "stopping"),
        ({"is_frozen": True, "num_live_requests": 1}, "frozen"),
    ],
)
def test_an_engine_that_serves_nobody_now_is_not_ready(server, run, says, state, reason):
    says(server.HANG, **state)
    result = run("--ready")
    assert (result.exit_code, result.stderr) == (1, f"Error: the engine is {reason}\n")


def test_a_long_queue_is_ready(server, run, says):
    says(server.HANG, num_live_requests=70)
    result = run("--ready", "--timeout", "0.3")
    assert result.exit_code == 0
    assert result.stdout.endswith("takes requests; 70 requests came before\n")


@pytest.mark.parametrize("probe", ["live", "ready"])
def test_no_server_is_neither(free_url, probe):
    result = CliRunner().invoke(health, ["--url", free_url, f"--{probe}"])
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_keeper_is_told_of_an_engine_that_was_given_up(server, says):
    says(engine="restarting")
    assert find_fault(Connection(server.url)) is None
    says(engine="failed", is_draining=True)
    assert find_fault(Connection(server.url)) is None
    says(engine="failed")
    assert (
        find_fault(Connection(server.url)) == "the engine died too often and is not started again"
    )


def test_a_keeper_judges_neither_an_absent_server_nor_another_model_nor_a_refusal(server, free_url):
    assert find_fault(Connection(free_url)) is None
    server.plays(server.refuse("model 'octavo' is not ready"))
    assert find_fault(Connection(server.url)) is None


def test_a_keeper_hears_of_a_stub_that_triton_cannot_reach(server):
    server.plays(server.refuse("Stub process 'octavo_0_0' is not healthy."))
    with pytest.raises(TimeoutError, match="stub process gives no sign of life"):
        find_fault(Connection(server.url))


def test_a_keeper_hears_of_a_server_that_only_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        port = frozen.getsockname()[1]
        with pytest.raises(TimeoutError, match="takes connections but does not answer"):
            find_fault(Connection(f"127.0.0.1:{port}"))


def test_a_keeper_hears_when_no_answer_comes(server):
    server.plays(server.HANG)
    with pytest.raises(TimeoutError, match=r"the model does not answer within 0\.2 s"):
        find_fault(Connection(server.url), timeout_s=0.2)


def test_a_keeper_without_its_certificates_judges_nothing(server, says, tmp_path):
    says(engine="failed")
    assert find_fault(Connection(server.url, ca=tmp_path / "absent.pem")) is None
