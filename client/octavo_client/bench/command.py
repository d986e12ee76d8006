"""The command `bench`: options become a plan, a run becomes a table, JSON and a plot."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from itertools import islice
from typing import IO, Any, Self

import click
from rich.console import Console
from rich.text import Text

from octavo_client.async_client import AsyncClient
from octavo_client.bench.driver import Driver
from octavo_client.bench.options import Settings, bench_options, settings_from
from octavo_client.bench.plot import draw_run, require_matplotlib
from octavo_client.bench.report import Report, make_report
from octavo_client.bench.server_metrics import counted_between
from octavo_client.bench.table import ReportView
from octavo_client.bench.trace import Run
from octavo_client.bench.workload import draw_jobs
from octavo_client.cli_options import (
    INTERRUPTED,
    Connection,
    connection_options,
    told_in_a_line,
)
from octavo_client.errors import Unavailable
from octavo_client.metrics_endpoint import fetch
from octavo_client.metrics_page import Sample

_FAILED = 1
#: Servers write their metrics ten times a second.
_METRICS_PAUSE_S = 0.5


@click.command()
@connection_options
@bench_options
def bench(
    connection: Connection, json_file: IO[str] | None, plot_file: IO[bytes] | None, **options: Any
) -> None:
    """Drive a running server and report its latencies and its throughput.

    Requests stream over gRPC. One that fails is counted and ends nothing; Ctrl-C reports what
    there is. Exit codes: 0 all went as planned, 1 a request failed or no model was ready, 2 wrong
    options, 130 stopped by Ctrl-C.
    """
    settings = settings_from(options)
    with told_in_a_line():
        if plot_file:
            require_matplotlib()
        run, counted = asyncio.run(_drive(connection, settings))
    report = make_report(run)
    title = f"{settings.label or connection.model}: {settings.describe()}"
    is_json_on_stdout = json_file is not None and json_file.name == "<stdout>"
    console = Console(highlight=False, stderr=is_json_on_stdout)
    console.print(Text(title), Text(), ReportView(report, counted), sep="\n")
    if json_file:
        server = {"url": connection.url, "model": connection.model, "counted": counted}
        whole = {"server": server, **_as_json(settings, run, report)}
        click.echo(json.dumps(whole), file=json_file)
    if plot_file:
        draw_run(run, title, plot_file)
    if report.failures or run.was_interrupted:
        raise click.exceptions.Exit(_FAILED if report.failures else INTERRUPTED)


async def _drive(connection: Connection, settings: Settings) -> tuple[Run, dict[str, int]]:
    """Drive the server as the settings say; return the run and what the server counted in it."""
    params = {"temperature": settings.temperature, "ignore_eos": settings.ignore_eos}
    jobs = draw_jobs(settings.workload)
    async with AsyncClient(**connection.arguments(), timeout_s=settings.timeout_s) as client:
        if not await client.is_ready():
            raise Unavailable(f"no model {connection.model} is ready at {connection.url}")
        warm_up = list(islice(jobs, settings.num_warm_up))
        warmed = await Driver(client, params).run(iter(warm_up), settings.warm_up_plan())
        if warmed.was_interrupted:
            raise asyncio.CancelledError
        before = await _look(settings.metrics_url)
        with _Progress() as progress:
            driver = Driver(client, params, on_end=progress.add)
            run = await driver.run(islice(jobs, settings.num_requests), settings.plan())
        after = await _look(settings.metrics_url) if before else None
        return run, counted_between(before, after, connection.model) if before and after else {}


async def _look(metrics_url: str | None) -> Sample | None:
    """Read the server's metrics, if it was said where; that it has none ends nothing."""
    if metrics_url is None:
        return None
    await asyncio.sleep(_METRICS_PAUSE_S)
    try:
        return fetch(metrics_url)
    except Unavailable as error:
        click.echo(f"Warning: {error}", err=True)
        return None


class _Progress:
    """Says on a terminal how many requests have ended, until its block is left."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._is_shown = sys.stderr.isatty()

    def add(self) -> None:
        self._num_ended += 1
        self._show(f"{self._num_ended:,} requests ended")

    def _show(self, text: str) -> None:
        if self._is_shown:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")


def _as_json(settings: Settings, run: Run, report: Report) -> dict[str, Any]:
    requests = [asdict(trace) for trace in run.traces]
    return {"settings": asdict(settings), "report": asdict(report), "requests": requests}
