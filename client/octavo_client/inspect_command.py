"""The command `inspect`: an engine's state as a picture or as JSON, once or again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from octavo_client.cli_options import Connection, connected, connection_options, seconds
from octavo_client.client import Client
from octavo_client.engine_view import EngineView


@click.command()
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a picture.")
@click.option(
    "--watch",
    "interval_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Look again after so many seconds, until Ctrl-C.",
)
@seconds("--timeout", default=10.0, show_default=True, help="Seconds to wait for the engine.")
def inspect(
    connection: Connection, as_json: bool, interval_s: float | None, timeout: float
) -> None:
    """Show the KV blocks and the queue of a running engine, if its server allows it."""
    is_live = interval_s is not None and not as_json
    with connected(connection) as client, _screen(is_live) as show:
        for state in _look(client, interval_s, timeout):
            if as_json:
                click.echo(json.dumps(state))
            else:
                show(state)


def _look(client: Client, interval_s: float | None, timeout_s: float) -> Iterator[dict[str, Any]]:
    yield client.inspect(timeout_s=timeout_s)
    while interval_s is not None:
        time.sleep(interval_s)
        yield client.inspect(timeout_s=timeout_s)


@contextmanager
def _screen(is_live: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give a function that draws a state: over the last one on a terminal, else below it."""
    console = Console(highlight=False)
    if not is_live or not console.is_terminal:
        yield lambda state: console.print(EngineView(state))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda state: live.update(EngineView(state, console.height), refresh=True)
