"""What adapters cost a decode step of the demo model: none, one row's, all rows' of one or several.

    python -m benchmarks.adapters [--batches 8,32] [--rank 16] [--adapters 8] [--rounds 30]

Adapters are random, and of all linear layers. Every kind of step takes its turn in each round.
Prints the median CPU time of a step on one thread, in milliseconds, as a table for docs: processor
time tells something on a busy machine too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import click
import torch
from benchmarks.doc_tables import markdown_table
from benchmarks.in_process import load_engine, make_request
from benchmarks.script_options import COUNT, Counts
from safetensors.torch import save_file

from octavo.engine import Engine
from octavo.local.demo_model import demo_checkpoint
from octavo.model.loader import read_spec
from octavo.model.tensor_names import expected_tensors

PROMPT_TOKENS = 20


def write_adapters(folder: Path, count: int, rank: int) -> Path:
    """Write random adapters of every linear layer; return the list of them."""
    shapes = expected_tensors(read_spec(demo_checkpoint()))
    for index in range(count):
        tensors = {}
        for name, shape in shapes.items():
            if len(shape) == 2 and ".layers." in name:
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1]) / 100
                tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank) / 100
        own = folder / str(index)
        own.mkdir()
        save_file(tensors, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ".*"}
        (own / "adapter_config.json").write_text(json.dumps(config))
    path = folder / "multi_lora.json"
    path.write_text(json.dumps({str(index): str(index) for index in range(count)}))
    return path


def time_steps(engine: Engine, names: list[str | None], num_steps: int) -> list[float]:
    """Return the CPU seconds of decode steps of one sequence for each name, or None, in `names`."""
    for index, name in enumerate(names):
        request = make_request([100 + index] * PROMPT_TOKENS, num_steps + 2)
        engine.add(replace(request, params=replace(request.params, lora_name=name)))
    times = []
    while engine.has_unfinished:
        started_s = time.process_time()
        engine.step()
        times.append(time.process_time() - started_s)
    return times[-num_steps:]


def measure(engine: Engine, batch: int, num_adapters: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a step by kind."""
    all_names = [str(index) for index in range(num_adapters)]
    kinds: dict[str, list[str | None]] = {
        "none": [None] * batch,
        "one row": ["0", *[None] * (batch - 1)],
        "all rows, one adapter": ["0"] * batch,
        f"all rows, {num_adapters} adapters": [*islice(cycle(all_names), batch)],
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, names in kinds.items():
            times[kind] += time_steps(engine, names, num_steps=4)
    return {kind: statistics.median(each) * 1e3 for kind, each in times.items()}


@click.command(help=__doc__)
@click.option("--batches", type=Counts(), default="8,32")
@click.option("--rank", type=COUNT, default=16)
@click.option("--adapters", "num_adapters", type=COUNT, default=8)
@click.option("--rounds", type=COUNT, default=30)
def main(batches: list[int], rank: int, num_adapters: int, rounds: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        engine = load_engine(
            device="cpu",
            cpu_threads=1,
            num_kv_blocks=1024,
            enable_prefix_caching=False,
            enable_lora=True,
            multi_lora=str(write_adapters(Path(folder), num_adapters, rank)),
            max_lora_rank=rank,
        )
        rows = {batch: measure(engine, batch, num_adapters, rounds) for batch in batches}
    kinds = list(next(iter(rows.values())))
    cells = [[str(batch), *(f"{row[kind]:.1f}" for kind in kinds)] for batch, row in rows.items()]
    click.echo(markdown_table(["sequences", *kinds], cells), nl=False)


if __name__ == "__main__":
    main()
