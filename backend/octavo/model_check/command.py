"""The command `octavo check`: what serving a model would take, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.option_docs import option_docs

#: Engine options that change what a model takes; the command has one of each by the same name.
_OPTIONS = (
    "max_model_len",
    "device",
    "devices",
    "dtype",
    "quantization",
    "model_impl",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_num_seqs",
    "enable_lora",
    "multi_lora",
    "max_loras",
    "max_lora_rank",
    "load_format",
    "trust_remote_code",
    "allow_pickle",
)


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `_OPTIONS`, each with its own documentation."""
    docs = {name: (default, text) for name, default, text in option_docs()}
    for name in reversed(_OPTIONS):
        default, text = docs[name]
        text = f"{text.replace('`', '')}  [default: {default}]"
        command = click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=text)(
            command
        )
    return command


@click.command()
@click.argument("model")
@_engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def check(model: str, as_json: bool, **options: Any) -> None:
    """Say what serving MODEL would take, before anything of its weights is downloaded or read.

    MODEL is a checkpoint directory, a GGUF file, a hub id or demo; of a hub, configs and the list
    of files are asked for. The options are the engine's own. Exits 1 if the model or an adapter
    cannot be served, with the reason.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        config = EngineConfig.from_mapping({"model": model, **given})
        # Imported late: torch takes seconds.
        from octavo.model_check.check import check_model
        from octavo.model_check.report import ReportView

        report = check_model(config)
    except OctavoError as error:
        raise click.ClickException(str(error)) from None
    view, console = ReportView(report), Console(highlight=False)
    if as_json:
        values = asdict(report)
        values["memory"]["num_sequences"] = report.memory.num_sequences
        click.echo(json.dumps(values))
    elif console.is_terminal:
        console.print(view)
    else:  # a line may be longer than any terminal is wide
        click.echo("\n".join(view.lines()))
    if refused := report.refused_adapters:
        raise click.ClickException(f"adapters are refused: {', '.join(refused)}")
