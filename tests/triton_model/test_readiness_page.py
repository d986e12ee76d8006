"""Where a model asks whether Triton takes requests for it, and which answers say that it won't."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.triton_model.readiness_page import ReadinessPage, readiness_url

PATH = "/v2/models/octavo/versions/1/ready"


class Triton(HTTPServer):
    """Answers with a status, and keeps the paths it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.paths: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Triton

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[Triton]:
    with Triton() as triton:
        threading.Thread(target=triton.serve_forever, args=(0.01,), daemon=True).start()
        yield triton
        triton.shutdown()


@pytest.fixture
def page(triton: Triton) -> ReadinessPage:
    return ReadinessPage(f"http://127.0.0.1:{triton.server_port}{PATH}")


@pytest.mark.parametrize("status", [400, 404, 503])
def test_a_page_that_says_no_is_a_refusal(triton: Triton, page: ReadinessPage, status: int) -> None:
    assert not page.is_refusing()
    triton.status = status
    assert page.is_refusing()
    triton.status = 200
    assert not page.is_refusing()
    assert triton.paths == [PATH] * 3


def test_a_page_that_is_restricted_says_nothing(triton: Triton, page: ReadinessPage) -> None:
    triton.status = 403
    assert not page.is_refusing()


def test_a_server_that_has_gone_refuses_but_not_one_that_never_answered(
    triton: Triton, page: ReadinessPage
) -> None:
    unknown = ReadinessPage(f"http://127.0.0.1:{triton.server_port}{PATH}")
    assert not page.is_refusing()
    triton.shutdown()
    triton.server_close()
    assert page.is_refusing()
    assert not unknown.is_refusing()


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "127.0.0.1:8000"),
        (["--http-port=9000", "--http-address", "127.0.0.5"], "127.0.0.5:9000"),
        (["--http-address=ipv6:::1", "--http-port", "1"], "[::1]:1"),
        (["--http-address=0.0.0.0", "--allow-http=true"], "127.0.0.1:8000"),
    ],
)
def test_the_page_is_where_the_servers_command_says(flags: list[str], address: str) -> None:
    url = readiness_url(["/opt/tritonserver/bin/tritonserver", *flags], "octavo", "1")
    assert url == f"http://{address}{PATH}"


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "serve.py"],
        ["tritonserver", "--allow-http=false"],
        ["tritonserver", "--allow-http", "0"],
        ["tritonserver", "--reuse-http-port=1"],
    ],
)
def test_a_server_that_may_not_be_the_one_that_answers_is_not_asked(command: list[str]) -> None:
    assert readiness_url(command, "octavo", "1") is None
