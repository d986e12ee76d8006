"""Commands of the client: `generate`, `chat`, `health`, `inspect`, `top` and `bench`.

Exit codes: 0 done, 1 the server failed or cannot be reached, 2 the request is wrong,
130 stopped by Ctrl-C. Answers, and headings between several, go to stdout, all else to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from octavo_client.answer import Completion, Delta
from octavo_client.bench.command import bench
from octavo_client.chat import Chat
from octavo_client.cli_options import (
    Connection,
    connected,
    connection_options,
    in_terms_of_options,
    request_params,
    sampling_options,
)
from octavo_client.client import Client
from octavo_client.health_command import health
from octavo_client.inspect_command import inspect
from octavo_client.meter import Meter
from octavo_client.top.command import top


@click.command()
@click.argument("prompt")
@connection_options
@sampling_options
@click.option("--n", type=int, help="Answers to make; several are printed when they are whole.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a response.")
def generate(
    prompt: str, connection: Connection, no_stream: bool, as_json: bool, **options: Any
) -> None:
    """Continue PROMPT, used as it is; `-` reads it from stdin."""
    if prompt == "-":
        prompt = sys.stdin.read()
    with connected(connection) as client:
        if no_stream or (not as_json and (options["n"] or 1) > 1):
            _print_whole(client, prompt, request_params(options), as_json)
        else:
            _print_growing(client, prompt, request_params(options), as_json)


@click.command()
@connection_options
@sampling_options
@click.option("--system", help="Instructions that open the conversation.")
def chat(connection: Connection, system: str | None, **options: Any) -> None:
    """Talk with the model; the conversation is kept until /clear, /exit or Ctrl-D."""
    with connected(connection) as client:
        Chat(client, system, request_params(options), describe=in_terms_of_options).run()


#: What the `octavo` command adds to its group.
COMMANDS: tuple[click.Command, ...] = (generate, chat, health, inspect, top, bench)


def _print_whole(client: Client, prompt: str, params: dict[str, Any], as_json: bool) -> None:
    meter = Meter()
    completion = client.generate(prompt, **params)
    count = len(completion.answers)
    deltas = [_as_delta(completion, index) for index in range(count)]
    meter.add(*deltas)
    for place, delta in enumerate(deltas, start=1):
        if count > 1 and not as_json:
            click.echo(f"--- {place} of {count}: {delta.finish_reason} ---")
        click.echo(_to_json(delta) if as_json else delta.text)
    click.echo(f"[{meter.summary()}]", err=True)


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
                meter.add(last)
                click.echo(_to_json(last) if as_json else last.text, nl=as_json)
    finally:
        if last is not None and not as_json:
            click.echo()
    click.echo(f"[{meter.summary()}]", err=True)


def _to_json(delta: Delta) -> str:
    values = dataclasses.asdict(delta)
    # No option asks for log-probabilities.
    told = {key: value for key, value in values.items() if "logprob" not in key}
    return json.dumps(told, ensure_ascii=False)
