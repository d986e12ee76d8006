"""`scripts/gpu-check`: everything that is promised of a GPU, checked and measured by one command.

It prints a report in Markdown, and what is under way on the standard error. Each part runs in a
process of its own: one that fails, or runs out of time, stops no other. The exit status is 0 where
all is as promised, 1 where a result is wrong or a part failed, 3 where only speed is missed, and 2
for wrong options.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu.context import Context
from gpu.parts import PARTS, run_part
from gpu.paths import ROOT, search_path
from gpu.report import PartResult, Section, exit_status, report_markdown

SCRIPT = ROOT / "scripts" / "gpu-check"
_MINUTES, _MORE_MINUTES = 10.0, 10.0
_LEFT_TO_REPORT_S = 5.0  # between the deadline a part is told of and that by which it is stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu-check needs a CUDA GPU, and this machine has none; --device cpu runs what can run "
            "without one, at tiny sizes",
            file=sys.stderr,
        )
        return 1
    if options.part:
        return _run_here(options)
    started_s = time.monotonic()
    has_several = options.device == "cuda" and torch.cuda.device_count() > 1
    minutes = options.minutes or _MINUTES + _MORE_MINUTES * has_several
    results = []
    for name in options.only or PARTS:
        left_s = started_s + minutes * 60 - time.monotonic()
        results.append(_run_apart(name, options, left_s))
        print(f"gpu-check: {name}: {results[-1].verdict}", file=sys.stderr)
        circumstances = _circumstances(options.device, time.monotonic() - started_s)
        report = report_markdown("What a GPU does", circumstances, results)
        if options.output:  # after each part: the machine may be taken away
            options.output.write_text(report, encoding="utf-8")
    print(report, end="")
    return exit_status(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Check and measure a GPU.",
        epilog="parts: " + "; ".join(f"{name}, {part.what}" for name, part in PARTS.items()),
    )
    parser.add_argument(
        "--only", type=_part_names, metavar="PARTS", help="run these alone, joined by commas"
    )
    parser.add_argument("--quick", action="store_true", help="run fewer cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    limit = f"stop after so many ({_MINUTES:g}, and {_MORE_MINUTES:g} more on several GPUs)"
    parser.add_argument("--minutes", type=_minutes, help=limit)
    parser.add_argument("--output", type=_output_file, help="write the report here too")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--sections", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=3600.0, help=argparse.SUPPRESS)
    return parser


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return minutes


def _output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _run_here(options: argparse.Namespace) -> int:
    """Run one part in this process; write its sections, as they are done, for who started it."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    deadline_s = time.monotonic() + options.seconds
    context = Context(torch.device(options.device), options.quick, deadline_s)
    sections = []
    for section in run_part(options.part, context):
        sections.append(section.to_json())
        # At once or not at all: this process may be stopped at any time.
        partial = options.sections.with_suffix(".partial")
        partial.write_text(json.dumps(sections))
        partial.replace(options.sections)
    return 0


def _run_apart(name: str, options: argparse.Namespace, left_s: float) -> PartResult:
    """Run one part in a process of its own, for as long as its budget and what is left allow."""
    budget_s = min(PARTS[name].budget_s, left_s)
    if options.device == "cpu":  # slow, and shared with others
        budget_s = left_s
    if budget_s <= _LEFT_TO_REPORT_S:
        return PartResult(name, 0.0, failure="no time was left")
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sections.json"
        command = [sys.executable, str(SCRIPT), "--part", name, "--sections", str(path)]
        command += ["--device", options.device, "--seconds", str(budget_s - _LEFT_TO_REPORT_S)]
        command += ["--quick"] if options.quick else []
        failure = _wait_for(command, budget_s)
        seconds = time.monotonic() - started_s
        written = json.loads(path.read_text()) if path.exists() else []
    return PartResult(name, seconds, tuple(map(Section.from_json, written)), failure)


def _wait_for(command: list[str], limit_s: float) -> str | None:
    """Run a command whose output goes to the standard error; return why it failed, if it did."""
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with tempfile.TemporaryFile("w+") as printed:
        try:
            done = subprocess.run(
                command, env=environment, stdout=printed, stderr=printed, timeout=limit_s
            )
            failure = None if done.returncode == 0 else f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {limit_s:.0f} s"
        printed.seek(0)
        text = printed.read()
    sys.stderr.write(text[-6000:])
    lines = [line for line in text.splitlines() if line.strip()]
    if failure and lines:
        failure = f"{failure}: {lines[-1][:200]}"
    return failure


def _circumstances(device: str, seconds: float) -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "triton", "transformers"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, at tiny sizes"
    made = f"Made by `scripts/gpu-check` on {datetime.date.today().isoformat()} on {where}"
    return f"{made}, in {seconds:.0f} s: {', '.join(versions)}."
