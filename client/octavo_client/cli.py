"""Commands of the client: `generate`, `chat`, `health` and `inspect`.

Exit codes: 0 done, 1 the server failed or cannot be reached, 2 the request is wrong,
130 stopped by Ctrl-C. Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from octavo_client.answer import Completion, Delta
from octavo_client.chat import Chat
from octavo_client.cli_options import (
    connected,
    connection_options,
    request_params,
    sampling_options,
)
from octavo_client.client import Client
from octavo_client.errors import OctavoClientError
from octavo_client.inspect_command import inspect
from octavo_client.meter import Meter


@click.command()
@click.argument("prompt")
@connection_options
@sampling_options
@click.option("--n", type=int, help="Answers to make; several are printed when they are whole.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a response.")
def generate(
    prompt: str, url: str, model: str, no_stream: bool, as_json: bool, **options: Any
) -> None:
    """Continue PROMPT, used as it is; `-` reads it from stdin."""
    if prompt == "-":
        prompt = sys.stdin.read()
    with connected(url, model) as client:
        if no_stream or (not as_json and (options["n"] or 1) > 1):
            _print_whole(client, prompt, request_params(options), as_json)
        else:
            _print_growing(client, prompt, request_params(options), as_json)


@click.command()
@connection_options
@sampling_options
@click.option("--system", help="Instructions that open the conversation.")
def chat(url: str, model: str, system: str | None, **options: Any) -> None:
    """Talk with the model; the conversation is kept until /clear, /exit or Ctrl-D."""
    with connected(url, model) as client:
        Chat(client, system, request_params(options)).run()


@click.command()
@connection_options
@click.option(
    "--timeout", type=float, default=10.0, show_default=True, help="Seconds to wait for the token."
)
def health(url: str, model: str, timeout: float) -> None:
    """Generate one token; exit 0 if it came in time, else 1."""
    with connected(url, model) as client:
        try:
            seconds = client.health(timeout)
        except OctavoClientError as error:
            raise click.ClickException(str(error)) from None
    click.echo(f"ok: {model} at {url} generated a token in {seconds:.3f} s")


#: What the `octavo` command adds to its group.
COMMANDS: tuple[click.Command, ...] = (generate, chat, health, inspect)


def _print_whole(client: Client, prompt: str, params: dict[str, Any], as_json: bool) -> None:
    meter = Meter()
    completion = client.generate(prompt, **params)
    meter.add(sum(answer.num_output_tokens for answer in completion.answers))
    for index, answer in enumerate(completion.answers):
        if as_json:
            click.echo(_to_json(_as_delta(completion, index)))
            continue
        if len(completion.answers) > 1:
            place = f"{index + 1} of {len(completion.answers)}"
            click.echo(f"--- {place}: {answer.finish_reason} ---", err=True)
        click.echo(answer.text)
    _print_stats(meter, completion)


def _as_delta(completion: Completion, index: int) -> Delta:
    answer = completion.answers[index]
    return Delta(
        answer.text,
        answer.token_ids,
        answer.finish_reason,
        completion.num_input_tokens,
        answer.num_output_tokens,
        index,
        completion.timing,
    )


def _print_growing(client: Client, prompt: str, params: dict[str, Any], as_json: bool) -> None:
    meter = Meter()
    last: Delta | None = None
    try:
        with client.stream(prompt, **params) as deltas:
            for last in deltas:
                meter.add(last.num_output_tokens)
                click.echo(_to_json(last) if as_json else last.text, nl=as_json)
    finally:
        if last is not None and not as_json:
            click.echo()
    if last is not None:
        _print_stats(meter, last)


def _print_stats(meter: Meter, last: Delta | Completion) -> None:
    cached = last.timing.cached_tokens if last.timing else 0
    read = f"{last.num_input_tokens} tokens read" + (f", {cached} of them cached" if cached else "")
    click.echo(f"[{read}; {meter.summary()}; {last.finish_reason}]", err=True)


def _to_json(delta: Delta) -> str:
    return json.dumps(dataclasses.asdict(delta), ensure_ascii=False)
