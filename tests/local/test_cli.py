"""The `octavo` command joins the client's commands and `serve`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from octavo import __version__
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.local.server_options import ServerOptions


def test_commands_are_the_clients_and_serve_and_watch() -> None:
    names = "bench chat check generate health inspect serve top watch"
    assert sorted(main.commands) == names.split()


def test_watch_of_a_program_that_is_not_there_says_so() -> None:
    result = CliRunner().invoke(main, ["watch", "--", "no-such-server", "--flag"])
    assert (result.exit_code, result.output) == (
        1,
        "Error: no-such-server cannot be run: No such file or directory\n",
    )


def test_watch_refuses_a_key_without_its_certificate_before_the_server_starts() -> None:
    result = CliRunner().invoke(main, ["watch", "--key", __file__, "--", "no-such-server"])
    assert (result.exit_code, result.output) == (
        2,
        "Error: --key is given without --cert but must have it beside\n",
    )


def test_help_has_a_whole_sentence_of_each_command() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name, command in main.commands.items():
        sentence = " ".join((command.help or "").split("\n\n")[0].split())
        assert f"{name} {sentence}" in text


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"octavo, version {__version__}\n"


def test_import_costs_no_torch() -> None:
    code = "import sys, octavo.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_serve_without_the_extras_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 1
    assert "pip install '.[server]' nvidia-pytriton" in result.output


def test_serve_refuses_a_flag_that_has_an_option() -> None:
    result = CliRunner().invoke(main, ["serve", "--", "--grpc-port=1"])
    assert (result.exit_code, result.output) == (
        1,
        "Error: flag --grpc-port is set by octavo itself; use its option instead\n",
    )


def test_triton_gets_as_long_again_to_leave_as_running_requests_get_to_finish() -> None:
    grace_s = ServerOptions().grace_s
    assert grace_s >= 2 * EngineConfig("demo").drain_timeout_s
    assert f"[default: {grace_s};" in CliRunner().invoke(main, ["serve", "--help"]).output
