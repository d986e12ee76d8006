"""What goes wrong inside is for the server's log: no client is told a path, a value or a stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient, EngineState
from octavo.engine_host import EngineThread
from octavo.errors import ConfigError
from octavo.restart_policy import RestartPolicy
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model import response_writer, service
from octavo.triton_model.live_request import LiveRequest
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.service import Service

SECRETS = re.compile(r"Traceback|\bFile \"|\.py\b|/opt/|/tmp/|0x[0-9a-f]{6}|secret")
PATH = "/opt/secret/kernel.cu"

MakeService = Callable[..., Service]
Ask = Callable[..., Any]


class BrokenEngine:
    """Fails in its first step, with a path in what it says."""

    def __init__(self, engine: Any) -> None:
        self.info = engine.info
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> None:
        raise RuntimeError(f"device error in {PATH}")


@pytest.fixture
def failing_service(
    fake_engine: ModuleType, tokenizer: Tokenizer, pb_utils: Any
) -> Callable[[], tuple[Service, EngineClient]]:
    """Return a function that makes a service whose engine fails once, and then cannot be loaded."""

    def make() -> tuple[Service, EngineClient]:
        starts = iter([True])

        def load(config: EngineConfig) -> Any:
            if next(starts, False):
                return BrokenEngine(fake_engine.FakeEngine(config))
            raise ConfigError(f"{PATH} is not there any more")

        config = EngineConfig("fake")
        restarts = RestartPolicy(max_restarts=2, first_delay_s=0.2)
        client = EngineClient(lambda: EngineThread(config, load), restarts=restarts)
        client.wait_ready()
        metrics = EngineMetrics(pb_utils, "octavo", "1")
        return Service(client, tokenizer, pb_utils, metrics, (), config), client

    return make


def test_an_engine_that_fails_with_a_path_and_cannot_be_loaded_again_says_neither(
    failing_service: Callable[[], tuple[Service, EngineClient]],
    make_request: Callable[..., Any],
    eventually: Callable[[Callable[[], bool]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving, client = failing_service()

    def error() -> str:
        request = make_request(text_input="a")
        serving.accept(request)
        return str(request.sender.wait_final().error.message)

    messages = [error(), error()]
    eventually(lambda: client.state is EngineState.FAILED)
    messages.append(error())
    serving.close()
    assert "the engine failed (RuntimeError), its log says why" in messages[0]
    assert "the engine does not start, the server's log says why" in messages[2]
    assert [message for message in messages if SECRETS.search(message)] == []
    assert f"{PATH} is not there any more" in caplog.text


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (service, "decode_request"),
        (service, "admit"),
        (response_writer, "encode_response"),
        (LiveRequest, "take"),
        (LiveRequest, "pop_response"),
    ],
)
def test_a_failure_in_any_stage_of_a_request_is_internal_and_says_no_more(
    make_service: MakeService, ask: Ask, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ValueError(f"{PATH}: {args!r} at {Path.cwd()}")

    monkeypatch.setattr(place, name, fail)
    error = ask(make_service(), "a", max_tokens=2).wait_final().error
    assert error.code == "INTERNAL"
    assert not SECRETS.search(error.message)
