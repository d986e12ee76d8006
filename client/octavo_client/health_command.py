"""`octavo health`: the probe of a server, for people, containers and Kubernetes.

Liveness asks whether only a restart of the server can help, readiness whether a request sent now is
served. Neither waits in a queue to find out that the server is alive.
"""

from __future__ import annotations

from time import perf_counter

import click

from octavo_client.cli_options import (
    Connection,
    connected,
    connection_options,
    in_terms_of_options,
    seconds,
)
from octavo_client.client import Client
from octavo_client.errors import OctavoClientError, RequestTimeout, Unavailable

# Errors that tell of a process that is there and says nothing, and which: Triton answers for a stub
# that was silent for a second, and gRPC for a server that takes connections alone.
_SILENCES = {
    "is not healthy": "the model's stub process gives no sign of life",
    "attempt timed out": "the server takes connections but does not answer",
}
_GIVEN_UP = "the engine died too often and is not started again"


@click.command()
@connection_options
@click.option("--live", "probe", flag_value="live", help="Fail if only a new server can help.")
@click.option("--ready", "probe", flag_value="ready", help="Fail if requests should go elsewhere.")
@seconds("--timeout", default=10.0, show_default=True, help="Seconds to wait for an answer.")
def health(connection: Connection, probe: str | None, timeout: float) -> None:
    """Generate one token; exit 0 if it came in time, else 1.

    With --live a busy engine need not prove itself, and one that restarts by itself is alive; with
    --ready a full queue, a restart and a server that stops count as failures.
    """
    checks = {"live": check_live, "ready": check_ready, None: check_token}
    with connected(connection) as client:
        try:
            finding = checks[probe](client, timeout)
        except OctavoClientError as error:
            raise click.ClickException(in_terms_of_options(error)) from None
    click.echo(f"{probe or 'ok'}: {connection.model} at {connection.url} {finding}")


def check_token(client: Client, timeout_s: float) -> str:
    """Generate one token, and return in words how long that took.

    Raises:
        OctavoClientError: no token came within `timeout_s`, and why.
    """
    return f"generated a token in {client.health(timeout_s):.3f} s"


def check_live(client: Client, timeout_s: float) -> str:
    """Return in words why the server need not be restarted; an idle engine must make a token.

    Raises:
        OctavoClientError: it must be, for it does not answer or its engine does not come back.
    """
    started = perf_counter()
    health = client.engine_health(timeout_s)
    if health.is_given_up:
        raise Unavailable(_GIVEN_UP)
    if health.is_draining:
        return f"stops, with {_requests(health.num_live_requests)} left"
    if health.engine != "ready":
        return f"is {health.engine} its engine by itself"
    if health.num_live_requests:
        return f"is at work on {_requests(health.num_live_requests)}"
    try:
        return check_token(client, _rest(started, timeout_s))
    except Unavailable as error:  # said by a model that lives
        return f"answers that {error}"


def check_ready(client: Client, timeout_s: float) -> str:
    """Return in words why a request sent now is served.

    Raises:
        OctavoClientError: it is not: the server is away, restarts, stops, is frozen or full.
    """
    started = perf_counter()
    health = client.engine_health(timeout_s)
    if health.engine != "ready" or health.is_draining or health.is_frozen:
        state = "stopping" if health.is_draining else health.engine
        raise Unavailable(f"the engine is {'frozen' if state == 'ready' else state}")
    try:
        return check_token(client, _rest(started, timeout_s))
    except RequestTimeout:
        if not health.num_live_requests:
            raise
        return f"takes requests; {_requests(health.num_live_requests)} came before"


def find_fault(connection: Connection, timeout_s: float = 10.0) -> str | None:
    """Return why only a new server can help, as far as the model itself can tell.

    None too where there is no such model or nobody may ask: that is not for its keeper to judge.
    Files of TLS are read anew each time, for they are exchanged while a server runs.

    Raises:
        TimeoutError: the server is there but no answer of the model came.
    """
    try:
        with Client(**connection.arguments()) as client:
            return _GIVEN_UP if client.engine_health(timeout_s).is_given_up else None
    except RequestTimeout:
        raise TimeoutError(f"the model does not answer within {timeout_s:g} s") from None
    except OctavoClientError as error:
        for words, silence in _SILENCES.items():
            if words in str(error):
                raise TimeoutError(silence) from None
        return None
    except OSError:  # one of those files is not there at the moment
        return None


def _rest(started: float, timeout_s: float) -> float:
    return max(0.001, timeout_s - (perf_counter() - started))


def _requests(count: int) -> str:
    return f"{count:,} request" if count == 1 else f"{count:,} requests"
