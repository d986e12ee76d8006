"""`scripts/tune-kernels`: measure the candidates of every table on this machine's GPU.

It prints the tables to paste into octavo_kernels; `scripts/kernel-table` says afterwards what they
use. Nothing is tuned while requests wait.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence

import torch
import triton

from gpu.timing import time_work
from gpu.tunable import Tunable
from gpu.tuned_tables import TABLES
from gpu.tuning import Config, Measure, choose, table_text
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import Architecture
from octavo_kernels._triton.ahead_of_time import compile_case

MeasureMaker = Callable[[Tunable], Measure]

# What the compiler raises where there is no code for some sizes; its passes raise the latter.
_REFUSALS = (triton.errors.TritonError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="tune-kernels", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    if not torch.cuda.is_available():
        print("tune-kernels measures on a CUDA GPU, and this machine has none", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    architecture = gpu_capability(torch.empty(0, device=device))
    if architecture is None:
        print("tune-kernels needs the GPU's kernels: unset OCTAVO_KERNELS", file=sys.stderr)
        return 1
    where = (
        f"{torch.cuda.get_device_name(device)}, {datetime.date.today().isoformat()}, "
        f"Triton {triton.__version__}"
    )
    tune(options.tables or list(TABLES), architecture, where, _on_device(device, architecture))
    return 0


def tune(
    names: Sequence[str], architecture: Architecture, where: str, make_measure: MeasureMaker
) -> None:
    """Choose and print each table; what is under way is told on the standard error."""
    for name in names:
        choices = []
        for tunable in TABLES[name](architecture):
            started_s = time.monotonic()
            choices.append(choose(tunable.entry, make_measure(tunable)))
            took_s = time.monotonic() - started_s
            print(f"{name}, {tunable.entry.label}: {took_s:.0f} s", file=sys.stderr)
        print(table_text(name, architecture, choices, where), flush=True)


def _on_device(device: torch.device, architecture: Architecture) -> MeasureMaker:
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    limit = properties["max_shared_mem"]

    def make(tunable: Tunable) -> Measure:
        def measure(config: Config) -> list[float] | None:
            try:
                for case in tunable.cases(config):
                    used = compile_case(case, architecture)
                    if used.stack_bytes or used.shared_bytes > limit:
                        return None
                return [time_work(work, device) for work in tunable.works(config, device)]
            except _REFUSALS:
                return None

        return measure

    return make
