"""The README tells the truth: its blocks are run, its table and its links are checked."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.option_docs import option_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, re.M | re.S)
SERVE, TEST = ("bash", "scripts/serve\n"), ("bash", "scripts/test\n")
RUN = [block for block in BLOCKS if block not in (SERVE, TEST)]
READY_TIMEOUT_S = 120.0


def read_greeting(process: subprocess.Popen[str]) -> str:
    """Return what the command prints up to its last line, which shows how to generate."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    greeting = ""
    while "octavo generate" not in greeting:
        line = lines.get(timeout=READY_TIMEOUT_S)
        assert line, f"the server ended after {greeting!r}"
        greeting += line
    return greeting


@pytest.fixture(scope="module")
def greeting() -> Iterator[str]:
    """Run the first block, with free ports, while the others are tried; return what it prints."""
    ports = {f"OCTAVO_SERVE_{kind}_PORT": "0" for kind in ("HTTP", "GRPC", "METRICS")}
    with subprocess.Popen(
        ["bash", "-c", f"exec {SERVE[1]}"],
        cwd=ROOT,
        env={**os.environ, **ports},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield read_greeting(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def address(greeting: str, kind: str) -> str:
    (found,) = re.findall(rf"^ *{kind} +(?:http://)?(127\.0\.0\.1:\d+)$", greeting, re.M)
    return found


def test_first_block_serves_and_the_last_tests_as_ci_does() -> None:
    assert BLOCKS[0] == SERVE
    assert BLOCKS[-1] == TEST
    assert os.access(ROOT / "scripts" / "test", os.X_OK)
    assert "/scripts/test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.e2e
@pytest.mark.parametrize(("language", "code"), RUN, ids=[code.split("\n")[0] for _, code in RUN])
def test_block_runs_as_written_and_prints_an_answer(
    greeting: str, language: str, code: str
) -> None:
    for usual, kind in (("127.0.0.1:8000", "HTTP"), ("127.0.0.1:8001", "gRPC")):
        code = code.replace(usual, address(greeting, kind))
    command = ["bash", "-euc"] if language == "bash" else [sys.executable, "-c"]
    result = subprocess.run(
        [*command, code],
        cwd=ROOT,
        env={**os.environ, "OCTAVO_GENERATE_URL": address(greeting, "gRPC")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"[A-Za-z]{3}", result.stdout), "there is no word in the answer"
    if "The capital of France is" in code:
        assert "Paris" in result.stdout


def test_option_table_is_that_of_the_code() -> None:
    assert option_table() in (ROOT / "docs" / "configuration.md").read_text()


def test_every_relative_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_help_in_the_readme_is_the_programs_own() -> None:
    shown = re.search(r"^\$ octavo serve --help\n(.*?)^```$", README, re.M | re.S)
    assert shown is not None
    answer = CliRunner().invoke(main, ["serve", "--help"], prog_name="octavo")
    assert shown.group(1) == answer.output
