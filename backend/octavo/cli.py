"""The `octavo` command: the client's commands, `check`, `serve` and `watch`.

Importing it costs no torch: the client is light, and the server's parts are imported when they
run.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import click

from octavo import __version__
from octavo.errors import OctavoError
from octavo.model_check.command import check
from octavo_client.cli import COMMANDS
from octavo_client.cli_options import Connection, connection_options, told_in_a_line
from octavo_client.health_command import find_fault

LEVELS = ("debug", "info", "warning", "error")


class _Commands(click.Group):
    """Tells of each command in a whole sentence, which click would cut to one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sentences = [
            (name, command.get_short_help_str(limit=sys.maxsize))
            for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(sentences)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "OCTAVO"},
)
@click.version_option(__version__, prog_name="octavo")
def main() -> None:
    """Serve language models in a Triton Inference Server, and talk to them.

    Every option can be set by a variable too: OCTAVO_SERVE_HTTP_PORT is --http-port of serve.
    """


@main.command(context_settings={"show_default": True})
@click.option("--model", help="Checkpoint directory, GGUF file, hub id or 'demo'.  [default: demo]")
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model repository to serve instead of one made for --model.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--http-port", default=8000, help="Port of HTTP; 0 takes a free one.")
@click.option("--grpc-port", default=8001, help="Port of gRPC; 0 takes a free one.")
@click.option("--metrics-port", default=8002, help="Port of the metrics; 0 takes a free one.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Device.  [default: the engine's choice]"
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    envvar="OCTAVO_TENSOR_PARALLEL_SIZE",
    help="Processes that share every layer.  [default: the model's own option, or 1]",
)
@click.option(
    "--pipeline-parallel-size",
    type=click.IntRange(min=1),
    envvar="OCTAVO_PIPELINE_PARALLEL_SIZE",
    help="Stages that share the layers.  [default: the model's own option, or 1]",
)
@click.option(
    "--grace",
    "grace_s",
    default=20.0,
    type=click.FloatRange(min=0),
    help="Seconds that Triton gets to leave; running requests get the model's drain_timeout_s.",
)
@click.option(
    "--max-restarts",
    default=5,
    type=click.IntRange(min=0),
    help="Times in a row that a server that failed is started again; 0 for none.",
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Least level shown.")
@click.option("-v", "--verbose", is_flag=True, help="Show everything, Triton's own lines too.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRITONSERVER_FLAG...]")
def serve(
    log_level: str, verbose: bool, max_restarts: int, flags: tuple[str, ...], **options: object
) -> None:
    """Start a Triton server on this machine and serve a model from it.

    A server that crashes, whose stub process dies or whose model stops answering is started again.
    Flags after -- go to tritonserver as they are.
    """
    if importlib.util.find_spec("pytriton") is None or importlib.util.find_spec("torch") is None:
        raise click.ClickException(
            "octavo serve needs the bundled server; run scripts/setup in a checkout, "
            "or pip install '.[server]' nvidia-pytriton there"
        )
    from octavo.local.serve import serve as run
    from octavo.local.server_options import ServerOptions

    level = logging.DEBUG if verbose else logging.getLevelNamesMapping()[log_level.upper()]
    try:
        asked = ServerOptions(flags=flags, **options)  # type: ignore[arg-type]
        run(asked, level, max_restarts, lambda url: find_fault(Connection(url)))
    except OctavoError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@connection_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def watch(connection: Connection, command: tuple[str, ...]) -> None:
    """Run COMMAND, a Triton server, and end it when only a new one can help.

    Meant for a container: it ends with the server, and the container's restart policy does the
    rest. The options say whom to ask how the model is. Exit codes: 1 after a fault, else the
    server's own.
    """
    from octavo.local.watch import watch as run

    with told_in_a_line():
        connection.arguments()  # what is wrong with them is said before the server starts
    try:
        status = run(command, lambda: find_fault(connection))
    except OctavoError as error:
        raise click.ClickException(str(error)) from None
    raise click.exceptions.Exit(status)


main.add_command(check)
for command in COMMANDS:
    main.add_command(command)
