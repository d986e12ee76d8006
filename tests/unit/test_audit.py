"""What the audit of dependencies says of a service that knows, one that does not, and none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).resolve().parents[2] / "scripts" / "audit.py"
CANARY = ("jinja2", "2.4.1")

Run = Callable[..., tuple[int, str]]


class Service(BaseHTTPRequestHandler):
    """Answers as the real one does, of the vulnerabilities in `known`."""

    known: dict[tuple[str, str], list[str]]
    asked: list[tuple[str, str]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = [(each["package"]["name"], each["version"]) for each in body["queries"]]
        type(self).asked = asked
        found = [[{"id": name} for name in self.known.get(each, ())] for each in asked]
        answer = json.dumps({"results": [{"vulns": each} if each else {} for each in found]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[type[Service], str]]:
    kind = type("OneService", (Service,), {"known": {CANARY: ["OLD-1"]}, "asked": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield kind, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def audit(tmp_path: Path) -> Run:
    def run(url: str, ignore: str = "# none\n", **options: Any) -> tuple[int, str]:
        constraints, accepted = tmp_path / "constraints.txt", tmp_path / "ignore.txt"
        constraints.write_text("# pins\nGood==1.0\ntorch==2.6.0+cpu\nbad.one==3.1 ; python\n")
        accepted.write_text(ignore)
        given = {"url": url, "constraints": constraints, "ignore": accepted, **options}
        arguments = [f"--{name}={value}" for name, value in given.items()]
        done = subprocess.run(
            [sys.executable, str(AUDIT), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"no_proxy": "127.0.0.1"},
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_clean_versions_pass(audit: Run, service: tuple[type[Service], str]) -> None:
    kind, url = service
    assert audit(url) == (0, "audit: 3 versions have no known vulnerability\n")
    assert kind.asked == [CANARY, ("good", "1.0"), ("torch", "2.6.0"), ("bad.one", "3.1")]


def test_a_vulnerable_version_fails_unless_a_reason_is_given(
    audit: Run, service: tuple[type[Service], str]
) -> None:
    kind, url = service
    kind.known = {**kind.known, ("bad.one", "3.1"): ["GHSA-2", "GHSA-1"]}
    assert audit(url) == (1, "audit: bad.one 3.1 has GHSA-1, GHSA-2\n")
    status, text = audit(url, "GHSA-1 only when it parses XML, which nothing here does\n")
    assert (status, text) == (
        1,
        "audit: bad.one 3.1 has GHSA-2\naudit: accepted are GHSA-1\n",
    )
    status, text = audit(url, "GHSA-1 not here\nGHSA-2 not here\nGHSA-3 gone\n")
    assert status == 0
    assert "audit: GHSA-3 is accepted but no longer found; remove it from ignore.txt\n" in text


def test_a_vulnerability_is_not_accepted_without_a_reason(audit: Run) -> None:
    status, text = audit("http://127.0.0.1:9", "GHSA-1\n")
    assert (status, text) == (
        1,
        "audit: ignore.txt names GHSA-1 but must give a reason behind it\n",
    )


def test_no_service_is_said_and_no_failure(audit: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for url in ("http://127.0.0.1:9", "http://no.such.host.invalid", silent_url):
            status, text = audit(url, timeout=0.5)
            assert status == 0
            assert text.startswith(f"audit: NOT DONE, {url} could not be asked (")
            assert text.endswith("3 versions were not compared with known vulnerabilities\n")


def test_a_service_that_knows_nothing_is_not_believed(
    audit: Run, service: tuple[type[Service], str]
) -> None:
    kind, url = service
    kind.known = {}
    assert "NOT DONE" in audit(url)[1]
