"""The bundled server's parts are laid out for the running interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.local import bundle
from octavo.local.server_command import engine_overrides, server_command
from octavo.local.server_options import ServerOptions


def test_backends_hold_copies_for_this_interpreter(tmp_path: Path) -> None:
    bundle.write_backends(tmp_path)
    assert sorted(path.name for path in (tmp_path / "python").iterdir()) == [
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    ]
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert os.access(tmp_path / "python" / "triton_python_backend_stub", os.X_OK)
    assert "from octavo.triton_model.model import" in (tmp_path / "octavo/model.py").read_text()


def test_numpy_2_is_refused_before_the_stub_crashes_with_it() -> None:
    bundle.check_numpy("1.26.4")
    with pytest.raises(ConfigError, match=r"numpy 2\.2\.6 is installed but .* needs numpy 1; run"):
        bundle.check_numpy("2.2.6")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("KIND_CPU", {"model": "demo"}),
        ("KIND_CPU", {"model": "demo", "device": "cpu", "allow_inspect": True}),
        ("KIND_CPU", {"model": "demo", "tensor_parallel_size": 1}),
        ("KIND_MODEL", {"model": "demo", "device": "cuda"}),
        ("KIND_MODEL", {"model": "demo", "device": "cpu", "tensor_parallel_size": 2}),
        ("KIND_MODEL", {"model": "demo", "pipeline_parallel_size": 3}),
    ],
)
def test_repository_holds_one_model(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    bundle.write_repository(tmp_path, options)
    config = (tmp_path / "octavo" / "config.pbtxt").read_text()
    assert 'backend: "octavo"' in config
    assert f"kind: {kind}\n" in config
    assert json.loads((tmp_path / "octavo/1/engine.json").read_text()) == options


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({}, {"model": "demo", "allow_inspect": True}),
        ({"model": "own", "host": "0.0.0.0"}, {"model": "own"}),
        (
            {"device": "cpu", "tensor_parallel_size": 2, "host": "0.0.0.0"},
            {"model": "demo", "device": "cpu", "tensor_parallel_size": 2},
        ),
    ],
)
def test_a_model_that_is_made_has_what_was_asked_for_and_may_be_inspected_at_home(
    tmp_path: Path, asked: dict[str, Any], made: dict[str, Any]
) -> None:
    options = ServerOptions(**asked)
    server_command(options, {}, tmp_path)
    assert json.loads((tmp_path / "models/octavo/1/engine.json").read_text()) == made
    assert engine_overrides(options) == {}


def test_models_of_a_given_repository_have_only_what_was_asked_for(tmp_path: Path) -> None:
    assert engine_overrides(ServerOptions(repository=tmp_path)) == {}
    asked = ServerOptions(model="own", pipeline_parallel_size=2, repository=tmp_path)
    assert engine_overrides(asked) == {"OCTAVO_MODEL": "own", "OCTAVO_PIPELINE_PARALLEL_SIZE": "2"}


@pytest.mark.parametrize(
    ("host", "is_private"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("localhost", True), ("::1", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")],
)
def test_a_server_is_private_if_other_machines_cannot_reach_it(host: str, is_private: bool) -> None:
    assert ServerOptions(host=host).is_private is is_private


def test_environment_puts_this_interpreter_and_the_wheels_libraries_first() -> None:
    environment = bundle.server_environment({"PATH": "/bin", "LD_LIBRARY_PATH": "/own", "A": "b"})
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin"
    libraries = environment["LD_LIBRARY_PATH"].split(":")
    assert libraries[0].endswith("nvidia_pytriton.libs")
    assert libraries[-1] == "/own"
    assert environment["A"] == "b"


@pytest.mark.parametrize("flag", ["--http-port=9", "--metrics-address", "--allow-http=false"])
def test_a_flag_that_repeats_an_option_is_refused(flag: str) -> None:
    name = flag.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^flag {name} is set by octavo itself"):
        ServerOptions(flags=(flag,))


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ((), {}),
        (("--http-restricted-api=health,inference:key=a:b=c",), {"key": "a:b=c"}),
        (("--http-restricted-api", "health:x-key=1", "--log-verbose=1"), {"x-key": "1"}),
        (
            ("--http-restricted-api=health:a=1", "--http-restricted-api=logging:b=2"),
            {"a": "1", "b": "2"},
        ),
    ],
)
def test_the_launcher_knows_the_keys_of_restricted_http(
    flags: tuple[str, ...], keys: dict[str, str]
) -> None:
    assert ServerOptions(flags=flags).http_keys == keys


def test_the_launcher_knows_whether_all_models_are_loaded() -> None:
    name = "--model-control-mode"
    assert ServerOptions().control_mode == "none"
    assert ServerOptions(flags=(f"{name}=poll",)).control_mode == "poll"
    assert ServerOptions(flags=(name, "explicit", "--load-model=*")).control_mode == "explicit"


def test_the_launcher_knows_whether_a_failed_load_ends_the_server() -> None:
    assert ServerOptions(flags=("--model-control-mode=explicit",)).ends_at_failed_load
    assert not ServerOptions(flags=("--exit-on-error=false",)).ends_at_failed_load
    assert not ServerOptions(flags=("--model-load-retry-count", "2")).ends_at_failed_load
