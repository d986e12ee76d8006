"""Compares the versions in constraints.txt with the vulnerabilities that OSV knows.

One request asks for all of them, so it takes a second or two. Where the service cannot be reached
within the limit, that is said and is no failure: a check must work without a network. A
vulnerability that audit-ignore.txt does not name with a reason is one. Ask OSV with `--url` at
another address, such as a mirror.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
#: A release of which everybody has known for years: who does not know it does not know the others.
CANARY = ("jinja2", "2.4.1")

Package = tuple[str, str]


def pinned(constraints: Path) -> list[Package]:
    """Return name and version of every package in a file of constraints."""
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", constraints.read_text(), re.M)
    # A build's label, as in 2.6.0+cpu, is no part of what vulnerabilities are told of.
    return [(name.lower(), version.partition("+")[0]) for name, version in pairs]


def ignored(path: Path) -> dict[str, str]:
    """Return the reason for each vulnerability that is known and accepted."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, reason = line.partition(" ")
        if name and not name.startswith("#"):
            if not reason.strip():
                sys.exit(f"audit: {path.name} names {name} but must give a reason behind it")
            found[name] = reason.strip()
    return found


def ask(url: str, packages: list[Package], timeout_s: float) -> list[list[str]]:
    """Return the vulnerabilities of each package by their ids.

    Raises:
        OSError: the service cannot be reached in time.
        ValueError: what answers is not the service.
    """
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in (CANARY, *packages)
    ]
    request = urllib.request.Request(
        url, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        results: list[Any] = json.load(answer)["results"]
    canary, *found = [[each["id"] for each in result.get("vulns") or ()] for result in results]
    if not canary or len(found) != len(packages):
        raise ValueError("the answer lacks what everybody knows")
    return found


def ask_in_time(url: str, packages: list[Package], timeout_s: float) -> list[list[str]]:
    """Do as `ask`, but never take longer: looking up a name heeds no limit.

    Raises:
        OSError: the service cannot be reached in time.
        ValueError: what answers is not the service.
    """
    answers: queue.SimpleQueue[list[list[str]] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask(url, packages, timeout_s))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


@click.command()
@click.option("--url", default="https://api.osv.dev/v1/querybatch", show_default=True)
@click.option("--constraints", type=click.Path(path_type=Path), default=ROOT / "constraints.txt")
@click.option(
    "--ignore", type=click.Path(path_type=Path), default=ROOT / "scripts" / "audit-ignore.txt"
)
@click.option("--timeout", default=10.0, help="Seconds to wait for the service.")
def main(url: str, constraints: Path, ignore: Path, timeout: float) -> None:
    """Fail on a known vulnerability of a pinned version; see the file's first lines."""
    packages, accepted = pinned(constraints), ignored(ignore)
    try:
        found = ask_in_time(url, packages, timeout)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        click.echo(
            f"audit: NOT DONE, {url} could not be asked ({reason}); "
            f"{len(packages)} versions were not compared with known vulnerabilities"
        )
        return
    ids = {each for vulnerabilities in found for each in vulnerabilities}
    for name in sorted(accepted.keys() - ids):
        click.echo(f"audit: {name} is accepted but no longer found; remove it from {ignore.name}")
    bad = [
        f"audit: {name} {version} has {', '.join(left)}"
        for (name, version), vulnerabilities in zip(packages, found, strict=True)
        if (left := sorted(set(vulnerabilities) - accepted.keys()))
    ]
    click.echo("\n".join(bad) or f"audit: {len(packages)} versions have no known vulnerability")
    if accepted.keys() & ids:
        click.echo(f"audit: accepted are {', '.join(sorted(accepted.keys() & ids))}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
