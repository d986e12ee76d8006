"""The command `top`: what goes on in a server, looked at again and again by its metrics."""

from __future__ import annotations

import time

import click

from octavo_client.cli_options import METRICS_URL, seconds, told_in_a_line
from octavo_client.errors import Unavailable
from octavo_client.metrics_endpoint import fetch
from octavo_client.printable import printable
from octavo_client.top.history import History
from octavo_client.top.screen import Screen, opened
from octavo_client.top.view import TopView


@click.command()
@click.option(
    "--metrics-url",
    default="http://127.0.0.1:8002/metrics",
    type=METRICS_URL,
    show_default=True,
    show_envvar=True,
    help="Where the server has its metrics.",
)
@click.option("--model", help="Show this model only; default: every model of Octavo.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@seconds(
    "--window",
    default=30.0,
    show_default=True,
    help="Last seconds that percentiles and counts tell of.",
)
@click.option("--once", is_flag=True, help="Look twice, print one picture and end.")
def top(metrics_url: str, model: str | None, interval: float, window: float, once: bool) -> None:
    """Watch requests, KV blocks, speed and latencies of a server; q or Ctrl-C ends it."""
    watch = _Watch(metrics_url, model, History(interval, window))
    with told_in_a_line():
        watch.start()
        with opened(is_live=not once) as screen:
            watch.run(screen, interval, once)


class _Watch:
    """Looks at a server; one that answered once is waited for when it goes away."""

    def __init__(self, url: str, model: str | None, history: History) -> None:
        self._url = url
        self._model = model
        self._history = history

    def start(self) -> None:
        """Look for the first time.

        Raises:
            Unavailable: the server has no metrics, or none of the model.
        """
        sample = fetch(self._url)
        names = sorted({name for name, _ in sample.models})
        if not names:
            raise Unavailable(f"{self._url} has no metrics of Octavo; is the model loaded?")
        if self._model is not None and self._model not in names:
            known = ", ".join(map(printable, names))
            raise Unavailable(f"{self._url} has no model {self._model!r}; it has {known}")
        self._history.add(sample)

    def run(self, screen: Screen, interval_s: float, once: bool) -> None:
        """Draw and look again until the user has had enough; `once`: look, then draw and end."""
        if not once:
            screen.show(self._picture("", screen.is_live))
        due_s = time.monotonic() + interval_s
        while not screen.wait(max(due_s - time.monotonic(), 0.0)):
            due_s = time.monotonic() + interval_s
            screen.show(self._picture(self._look(), screen.is_live))
            if once:
                return

    def _look(self) -> str:
        """Take another look; return what went wrong, if anything did."""
        try:
            self._history.add(fetch(self._url))
        except Unavailable as error:
            self._history.miss()
            return f"{error}; trying again"
        return ""

    def _picture(self, trouble: str, is_live: bool) -> TopView:
        sample = self._history.last
        keys = sample.models if sample is not None else ()
        trends = [self._history.trend(key) for key in keys if self._model in (None, key[0])]
        clock = time.strftime("%H:%M:%S")
        return TopView(f"octavo top  {self._url}  {clock}", trends, trouble, is_live=is_live)
