"""The class that Triton calls, with the module that exists only in a stub put in its place."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from octavo.engine_host import EngineThread
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model import loading


@pytest.fixture
def model_module(
    monkeypatch: pytest.MonkeyPatch, pb_utils: Any, fake_engine: ModuleType, tokenizer: Tokenizer
) -> ModuleType:
    """Return `octavo.triton_model.model` on the fake engine and tokenizer."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    from octavo.triton_model import model

    monkeypatch.setattr(model, "pb_utils", pb_utils)
    monkeypatch.setattr(
        model, "start_host", lambda config: EngineThread(config, fake_engine.FakeEngine)
    )
    monkeypatch.setattr(loading, "resolve_model", lambda name: name)
    monkeypatch.setattr(loading, "checkpoint_directory", lambda name, **_: name)
    monkeypatch.setattr(Tokenizer, "load", lambda name, **_: tokenizer)
    return model


@pytest.fixture
def args() -> dict[str, str]:
    """What Triton passes to `initialize`."""
    return {
        "model_config": '{"parameters": {"model": {"string_value": "fake"}}}',
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_repository": "nowhere",
        "model_version": "1",
        "model_name": "octavo",
    }


def test_a_model_lives_from_initialize_to_finalize(
    model_module: ModuleType, args: dict[str, str], make_request: Callable[..., Any]
) -> None:
    model = model_module.TritonPythonModel()
    model.initialize(args)
    assert model.is_ready()
    requests = [
        make_request(text_input="ab", parameters={"max_tokens": 2}),
        make_request(text_input=b"\xff"),
    ]
    assert model.execute(requests) is None
    assert requests[1].sender.error.code == "INVALID_ARG"
    assert requests[0].sender.wait_final().text == "abab"
    model.finalize()
    assert not model.is_ready()


def test_a_model_that_cannot_be_loaded_raises_from_initialize(
    model_module: ModuleType, args: dict[str, str]
) -> None:
    args["model_config"] = '{"parameters": {"model": {"string_value": "unloadable"}}}'
    with pytest.raises(ConfigError, match=r"^the checkpoint is damaged$"):
        model_module.TritonPythonModel().initialize(args)


def test_a_tokenizer_that_cannot_be_loaded_ends_the_engine_too(
    model_module: ModuleType,
    args: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
) -> None:
    def fail(name: str, **_: Any) -> Tokenizer:
        raise ConfigError("no tokenizer")

    monkeypatch.setattr(Tokenizer, "load", fail)
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"^no tokenizer$"):
        model_module.TritonPythonModel().initialize(args)
    eventually(lambda: set(threading.enumerate()) <= threads)


def test_spans_without_the_library_that_makes_them_fail_the_load(
    model_module: ModuleType, args: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "octavo.triton_model.tracing", raising=False)
    config = json.loads(args["model_config"])
    config["parameters"]["otlp_endpoint"] = {"string_value": "http://localhost:4318/v1/traces"}
    args["model_config"] = json.dumps(config)
    with pytest.raises(
        ConfigError, match=r"pip install opentelemetry-sdk .*, or leave the option out$"
    ):
        model_module.TritonPythonModel().initialize(args)


def test_the_configuration_is_completed_without_loading_anything(
    model_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(model_module, "complete_config", seen.append)
    config = object()
    assert model_module.TritonPythonModel.auto_complete_config(config) is config
    assert seen == [config]
