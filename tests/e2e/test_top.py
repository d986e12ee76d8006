"""`octavo top` on a real server: what runs there is seen by its metrics alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]


def look(server: TritonServer) -> list[str]:
    arguments = ["top", "--metrics-url", server.metrics_url, "--once", "--interval", "0.5"]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
    assert (result.exit_code, result.stderr) == (0, "")
    return [line.rstrip() for line in result.stdout.splitlines()]


def figures(lines: list[str], label: str) -> list[float]:
    (line,) = [line for line in lines if line.startswith(f"{label}  ")]
    return [float(figure.replace(",", "")) for figure in re.findall(r"[\d,.]+", line)]


def test_a_running_stream_is_seen_and_its_end_too(
    tiny_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    def running() -> int:
        return int(metrics(tiny_server)["num_requests_running"])

    assert become(lambda: running() == 0)
    ended = int(metrics(tiny_server)["requests_total abort"])
    with (
        Client(tiny_server.grpc_url, timeout_s=60) as client,
        client.stream("Once upon a time", max_tokens=20_000, ignore_eos=True) as deltas,
    ):
        next(deltas)
        assert become(lambda: running() == 1)
        lines = look(tiny_server)
    assert lines[2].startswith("octavo, version 1: engine up")
    assert figures(lines, "requests") == [1, 0, 0]
    assert figures(lines, "tokens/s")[0] > 0
    for label in ("between tokens", "step"):
        assert 0 < figures(lines, label)[0] <= figures(lines, label)[1]
    (blocks,) = [line.split() for line in lines if line.endswith(" of 8,192")]
    assert blocks[1::2] == ["used", "cached", "free", "8,192"]
    assert int(blocks[0]) >= 1
    assert sum(int(count.replace(",", "")) for count in blocks[:6:2]) == 8192
    assert become(lambda: running() == 0)
    (finished,) = [line for line in look(tiny_server) if line.startswith("finished")]
    assert f"0 abort ({ended + 1:,})" in finished
