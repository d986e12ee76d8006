"""What `octavo serve` says when its server is ready is true of each model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from octavo.local.greeting import greeting
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

OCTAVO = {"name": "octavo", "version": "1", "state": "READY"}
ECHO = {"name": "echo"}  # as Triton tells of a model that was never loaded
EXPLICIT = ("--model-control-mode=explicit",)


@pytest.fixture
def greet() -> Iterator[Callable[..., list[str]]]:
    """Return a function that greets for a server with this index, or with none to be seen."""
    servers: list[HTTPServer] = []

    def ask(index: list[dict[str, str]] | None, flags: tuple[str, ...] = ()) -> list[str]:
        class Index(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(403 if index is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(index).encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Index))
        Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        options = ServerOptions(http_port=servers[-1].server_port, flags=flags)
        return greeting(TritonServer(options), 1.23).splitlines()

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


def test_commands_are_told_where_octavo_is_loaded(greet: Callable[..., list[str]]) -> None:
    first, *_, blank, curl, generate = greet([OCTAVO, {"name": "other", "state": "READY"}])
    assert first == "Octavo is ready after 1.2 s (Ctrl-C stops it)"
    assert blank == ""
    assert "/v2/models/octavo/generate_stream -d '{" in curl
    assert generate.endswith('octavo generate "The capital of France is"')


def test_a_model_that_is_not_loaded_is_named_and_none_is_told_to_be_asked(
    greet: Callable[..., list[str]],
) -> None:
    unloaded = {**OCTAVO, "state": "UNAVAILABLE", "reason": "unloaded"}
    first, http, *_, blank, absent, curl = greet([ECHO, unloaded], EXPLICIT)
    assert first == "The server is ready after 1.2 s, and no model is loaded (Ctrl-C stops it)"
    assert (blank, absent) == ("", "  not loaded: echo, octavo")
    assert curl == f"  curl -X POST {http.split()[1]}/v2/repository/models/echo/load"


def test_a_model_with_an_older_version_that_is_not_loaded_is_loaded(
    greet: Callable[..., list[str]],
) -> None:
    older = {"name": "octavo", "version": "2", "state": "UNAVAILABLE"}
    lines = greet([OCTAVO, older, ECHO])
    assert "  not loaded: echo" in lines
    assert lines[-1].endswith('octavo generate "The capital of France is"')
    assert not any("/load" in line for line in lines), "the server takes no such request"


def test_who_may_not_ask_for_models_claims_nothing_of_them(
    greet: Callable[..., list[str]],
) -> None:
    lines = greet(None)
    assert lines[0] == "Octavo is ready after 1.2 s (Ctrl-C stops it)"
    assert [line.split()[0] for line in lines[1:]] == ["HTTP", "gRPC", "metrics"]
