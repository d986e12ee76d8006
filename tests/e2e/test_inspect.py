"""`octavo inspect` on a real server: what runs there is seen by gRPC, HTTP and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

Post = Callable[..., tuple[int, str]]
StartServer = Callable[..., TritonServer]
Become = Callable[..., bool]

PROMPT = [7001 + place for place in range(40)]


REQUEST = {"input_ids": PROMPT, "max_tokens": 20_000, "ignore_eos": True}


@pytest.fixture
def stream(tiny_server: TritonServer, become: Become) -> Any:
    """Keep one request of 40 prompt tokens running; give the client it came from."""
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        assert become(lambda: not client.inspect()["sequences"])
        with client.stream(**REQUEST) as deltas:
            next(deltas)
            yield client


def check(state: dict[str, Any]) -> None:
    (sequence,) = state["sequences"]
    assert sequence["status"] == "running"
    assert sequence["num_prompt_tokens"] == 40
    # Three blocks hold the prompt; those of the tokens that followed come behind them.
    table = sequence["block_table"]
    assert len(table) == -(-sequence["num_computed_tokens"] // 16) >= 3
    assert [state["device"]["states"][block] for block in table] == ["u"] * len(table)
    assert state["num_used_slots"] == sequence["num_computed_tokens"]
    assert state["num_allocated_slots"] == 16 * len(table)
    assert len(state["device"]["states"]) == 8192


def test_a_running_stream_is_seen_by_grpc_and_goes_on(stream: Client) -> None:
    first, second = stream.inspect(timeout_s=30), stream.inspect(timeout_s=30)
    check(first)
    check(second)
    computed = [state["sequences"][0]["num_computed_tokens"] for state in (first, second)]
    assert computed[0] < computed[1]


@pytest.mark.parametrize(
    "body", [{"parameters": {"inspect": True}}, {"inspect": True}], ids=["nested", "flat"]
)
def test_a_running_stream_is_seen_by_http(
    tiny_server: TritonServer, stream: Client, post: Post, body: dict[str, Any]
) -> None:
    status, answer = post(tiny_server, "models/octavo/generate", body)
    assert status == 200
    check(json.loads(json.loads(answer)["text_output"]))


def test_the_command_draws_it(tiny_server: TritonServer, stream: Client) -> None:
    arguments = ["inspect", "--url", tiny_server.grpc_url]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    first, second, third = (
        next(place for place, line in enumerate(lines) if line.startswith(title))
        for title in ("1 running, first to last", "0 waiting", "8,192 blocks of 16 tokens, ")
    )
    assert first < second < third
    assert lines[-1].endswith(" free blocks"), "what nobody uses is one line"


def test_two_streams_of_one_prompt_share_its_full_blocks(stream: Client) -> None:
    with stream.stream(**REQUEST) as deltas:
        next(deltas)
        state = stream.inspect()
    first, second = state["sequences"]
    prefix = first["block_table"][:2]
    assert second["block_table"][:2] == prefix
    assert state["device"]["num_owners"] == {str(block): 2 for block in prefix}
    assert set(state["device"]["hashes"]) >= {str(block) for block in prefix}
    assert second["num_cached_tokens"] == 32
    own = first["num_computed_tokens"] + second["num_computed_tokens"]
    assert state["num_used_slots"] == own - 32


def test_an_idle_engine_is_seen_and_its_prefix_stays_cached(
    tiny_server: TritonServer, become: Become
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        client.generate(input_ids=PROMPT, max_tokens=1)
        assert become(lambda: not client.inspect()["sequences"])
        state = client.inspect()
    counts = state["device"]["counts"]
    assert counts["used"] == counts["shared"] == state["num_allocated_slots"] == 0
    assert counts["cached"] >= 2
    assert len(state["device"]["hashes"]) == counts["cached"]


def test_a_server_that_does_not_allow_it_says_how_to(start_server: StartServer) -> None:
    server = start_server(environment={"OCTAVO_ALLOW_INSPECT": "false"})
    result = CliRunner().invoke(main, ["inspect", "--url", server.grpc_url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "Error: inspect is not allowed: the engine's option allow_inspect is false; set it to true"
    )
