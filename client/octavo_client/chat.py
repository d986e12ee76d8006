"""A conversation in the terminal: reads turns, streams answers, keeps the history.

Knows nothing of command-line options.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import click

from octavo_client.client import Client
from octavo_client.errors import OctavoClientError
from octavo_client.meter import Meter

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (importing it gives `input` line editing and history)

GREETING = "/clear starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer, /help says this."


class Chat:
    """One conversation with one model.

    In a terminal Ctrl-C and errors end the answer only. Read from a file or pipe, one line is
    one turn, nothing prompts, and Ctrl-C or the first error ends the conversation.

    Args:
        system: instructions that open the conversation.
        params: arguments of `Client.stream`.
        describe: returns what a person reads of an error.
    """

    def __init__(
        self,
        client: Client,
        system: str | None,
        params: dict[str, Any],
        *,
        describe: Callable[[OctavoClientError], str],
    ) -> None:
        self._client = client
        self._describe = describe
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Take turns until the input ends.

        Raises:
            OctavoClientError: a turn failed and the input is no terminal.
            KeyboardInterrupt: Ctrl-C, and the input is no terminal.
        """
        if self._interactive:
            click.echo(GREETING, err=True)
        while (text := self._read_turn()) is not None:
            if text == "/exit":
                return
            if text == "/help":
                click.echo(GREETING, err=True)
            elif text == "/clear":
                self._messages = list(self._opening)
            elif text:
                self._take_turn(text)

    def _read_turn(self) -> str | None:
        if not self._interactive:
            line = sys.stdin.readline()
            return line.strip() if line else None
        while True:
            try:
                return input("> ").strip()
            except EOFError:
                click.echo(err=True)
                return None
            except KeyboardInterrupt:
                click.echo(err=True)

    def _take_turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        meter = Meter()
        try:
            self._stream_answer(answer, meter)
        except (OctavoClientError, KeyboardInterrupt) as error:
            click.echo()
            if not self._interactive:
                raise
            if isinstance(error, OctavoClientError):
                click.echo(f"Error: {self._describe(error)}", err=True)
            else:
                click.echo("stopped", err=True)
        if answer:
            self._messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            self._messages.pop()

    def _stream_answer(self, answer: list[str], meter: Meter) -> None:
        with self._client.stream(messages=self._messages, **self._params) as deltas:
            for delta in deltas:
                meter.add(delta)
                if delta.text:
                    answer.append(delta.text)
                    click.echo(delta.text, nl=False)
        click.echo()
        click.echo(f"[{meter.summary()}]", err=True)
