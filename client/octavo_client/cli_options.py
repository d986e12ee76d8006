"""Options that several commands share, and how an exception becomes a line and an exit code."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from octavo_client.client import Client
from octavo_client.errors import InvalidRequest, OctavoClientError
from octavo_client.transport import tls_credentials

#: Exit code of a command that Ctrl-C ended.
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

#: Arguments of the client and tensors by names that no option has.
_OTHER_NAMES = {
    "deadline_ms": "--deadline in milliseconds",
    "text_input": "PROMPT",
    "timeout_s": "--timeout",
}


def seconds(*names: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return the decorator that adds an option of seconds, above 0."""
    return click.option(*names, type=click.FloatRange(min=0, min_open=True), **attributes)


class _Header(click.ParamType):  # type: ignore[type-arg]
    """A name and a value around `=`; in a variable several stand on lines of their own."""

    name = "name=value"
    envvar_list_splitter = "\n"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        name, equals, text = str(value).partition("=")
        if not equals or not name.strip():
            # The value may be a secret that lost its name.
            self.fail("it must be a name, '=' and a value", param, ctx)
        return name.strip(), text.strip()


class _MetricsUrl(click.ParamType):  # type: ignore[type-arg]
    name = "url"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            parts = urlsplit(value)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port that is no number, or of brackets
            is_address = False
        if not is_address:
            self.fail(f"{value!r} must look like http://127.0.0.1:8002/metrics", param, ctx)
        return str(value)


#: Where a server has its metrics.
METRICS_URL = _MetricsUrl()

_PEM = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHOWN: dict[str, Any] = {"show_default": True, "show_envvar": True}
_CONNECTION = (
    click.option("--url", default="127.0.0.1:8001", help="Host and gRPC port.", **_SHOWN),
    click.option("--model", default="octavo", help="Model name on the server.", **_SHOWN),
    click.option("--tls", is_flag=True, help="Encrypt the connection."),
    click.option("--ca", type=_PEM, help="Certificates to trust (PEM); implies --tls."),
    click.option("--cert", type=_PEM, help="Own certificate, if the server asks; implies --tls."),
    click.option("--key", type=_PEM, help="Private key of --cert."),
    click.option(
        "--header",
        "headers",
        type=_Header(),
        multiple=True,
        show_envvar=True,
        help="Sent with every call, such as a restricted protocol's key; may be repeated.",
    ),
)
_SAMPLING = (
    click.option("--max-tokens", type=int, help="Tokens to generate at most."),
    click.option("--temperature", type=float, help="0 takes the most likely token each time."),
    click.option("--top-p", type=float, help="Draw among the fewest tokens that reach this sum."),
    click.option("--top-k", type=int, help="Draw among the k most likely tokens; 0 means all."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest."),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--lora-name", help="Answer with this adapter of the server's."),
    click.option("--stop", multiple=True, help="End before this text; may be given repeatedly."),
    seconds("--timeout", help="Seconds for a whole answer; default: no limit."),
)
_SCHEDULING = (
    click.option("--priority", type=int, help="Lower runs first, where the server heeds it."),
    seconds("--deadline", help="Seconds until the server ends it with what there is."),
    click.option("--tenant", help="Who asks, where the server shares fairly among tenants."),
    click.option("--cache-salt", help="Share cached prefixes only with requests of this salt."),
)


class BadRequest(click.ClickException):
    """Ends a command whose request the server refused as wrong."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Connection:
    """Which model of which server a command talks to, and how."""

    url: str
    model: str = "octavo"
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Return the keywords that `Client` and `AsyncClient` take for it.

        Raises:
            InvalidRequest: one of certificate and key is given alone.
        """
        files = (self.ca, self.cert, self.key)
        is_encrypted = self.tls or any(files)
        return {
            "url": self.url,
            "model": self.model,
            "credentials": tls_credentials(*files) if is_encrypted else None,
            "headers": dict(self.headers),
        }


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--url`, `--model` and those of TLS and headers; they come as one `Connection`."""

    @functools.wraps(command)
    def with_connection(*args: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in Connection.__slots__}
        return command(*args, connection=Connection(**own), **options)

    decorated: Callable[..., Any] = with_connection
    for option in reversed(_CONNECTION):
        decorated = option(decorated)
    return decorated


def sampling_options(command: Command) -> Command:
    """Add the sampling and scheduling parameters, and `--timeout`."""
    for option in reversed((*_SAMPLING, *_SCHEDULING)):
        command = option(command)
    return command


def request_params(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `sampling_options` as arguments of `Client.stream`."""
    params = {key: value for key, value in options.items() if value is not None}
    params["timeout_s"] = params.pop("timeout", None)
    if "deadline" in params:
        params["deadline_ms"] = params.pop("deadline") * 1000.0
    if not params["stop"]:
        del params["stop"]
    return params


def in_terms_of_options(error: OctavoClientError) -> str:
    """Return what an error says, with the parameters it is about named as the running command does.

    They are the one it opens with, and the one without which that is given.
    """
    names = {str(each.name): each.opts[0] for each in click.get_current_context().command.params}
    names |= _OTHER_NAMES
    parameter = r"^\w+(?= (is|has) )|(?<= given without )\w+"
    return re.sub(parameter, lambda found: names.get(found[0], found[0]), str(error))


@contextmanager
def connected(connection: Connection) -> Iterator[Client]:
    """Open a client; end the command as `told_in_a_line` does when anything fails."""
    with told_in_a_line(), Client(**connection.arguments()) as client:
        yield client


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """End the command with a line and an exit code when a client fails, or at Ctrl-C."""
    try:
        yield
    except InvalidRequest as error:
        raise BadRequest(in_terms_of_options(error)) from None
    except OctavoClientError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo(err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
