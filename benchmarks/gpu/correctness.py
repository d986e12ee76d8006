"""The part `kernels`: every operation agrees with its reference on the device.

Two ways: pytest runs the checks of tests/kernels/on_device where it is installed and the device is
a GPU; the comparisons here need nothing but torch, and run anywhere.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from typing import Any

import torch

from gpu.context import Context
from gpu.expert_operations import expert_operations
from gpu.logit_operations import logit_operations
from gpu.paths import ROOT, search_path
from gpu.quantized_operations import quantized_operations
from gpu.report import Line, Section, Verdict
from gpu.row_operations import RowOperation, Tensors, results_of, row_operations
from gpu.sequences import Share, draw_sequences
from octavo_kernels import gather_blocks, make_attention_backend, scatter_blocks

CHECKS = ROOT / "tests" / "kernels" / "on_device"

# (absolute, relative) allowed between an operation and its reference, both float32 inside: a GPU
# approximates e^x and divisions, sums differ in order, and the result's rounding may fall either
# way.
_TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-5, 2**-7),
    torch.float16: (2e-5, 2**-10),
}
# Attention against float64: weights and results are rounded once each.
_ATTENTION_TOLERANCES = {
    torch.float32: (4e-6, 2e-5),
    torch.float16: (1e-3, 2**-9),
    torch.bfloat16: (8e-3, 2**-6),
}


def kernels(context: Context) -> list[Section]:
    """Compare everything that runs on the device with its reference."""
    torch.manual_seed(1)
    operations = [*row_operations(), *logit_operations(), *expert_operations()]
    operations += quantized_operations(context.device)
    lines = [_row_line(operation, context) for operation in operations]
    lines += [_attention_line(name, context) for name in _ATTENTIONS]
    lines.append(_moves_line(context))
    heads = ("operation", "cases", "largest error, in units of what is allowed")
    sections = [Section("Operations against their references", heads, tuple(lines))]
    if context.is_gpu:
        sections.append(_pytest_section(context))
    return sections


def _row_line(operation: RowOperation, context: Context) -> Line:
    worst, cases = 0.0, 0
    for dtype in context.dtypes_of(operation.dtypes):
        for num_rows in (1, 7) if context.quick else (1, 7, 63, 129, 1000):
            rows, shared = operation.draw(num_rows, dtype)
            actual = results_of(operation.compute, *_to(context.device, rows, shared))
            expected = results_of(operation.reference, rows, shared)
            for a, b in zip(actual, expected, strict=True):
                error = _differing(a, b, operation) if not a.is_floating_point() else _error(a, b)
                worst, cases = max(worst, error), cases + 1
    return Line((operation.name, str(cases), f"{worst:.2f}"), Verdict.of(worst <= 1.0))


def _to(device: torch.device, *groups: Tensors) -> tuple[Tensors, ...]:
    return tuple(tuple(tensor.to(device) for tensor in group) for group in groups)


def _error(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerances: dict[torch.dtype, tuple[float, float]] = _TOLERANCES,
) -> float:
    """Return the largest error in units of what is allowed; infinite if one of them is no number.

    Where the reference says infinity, so must the other.
    """
    absolute, relative = tolerances[actual.dtype]
    a, b = actual.cpu().double(), expected.cpu().double()
    same = a == b
    allowed = absolute + relative * b.abs()
    error = torch.where(same, 0.0, (a - b).abs() / allowed)
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def _differing(actual: torch.Tensor, expected: torch.Tensor, operation: RowOperation) -> float:
    """Return how many whole numbers differ, in units of how many may; infinite if none may."""
    differing = int((actual.cpu() != expected.cpu()).sum())
    allowed = max(1.0, operation.most_differing * expected.numel())
    if differing and not operation.most_differing:
        return torch.inf
    return differing / allowed


# Name: heads, options, and shares of sequences: a chunk past splits, decodes, a first token.
_ATTENTIONS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "plain": ((2, 4, 128), {}),
    "one head a key": ((4, 1, 64), {}),
    "window": ((1, 8, 64), {"window": 100}),
    "soft cap": ((2, 2, 256), {"soft_cap": 20.0}),
    "sinks": ((1, 3, 80), {"sinks": torch.tensor([-1.0, 0.0, 3.0])}),
    "window, cap and sinks": (
        (1, 3, 32),
        {"window": 33, "soft_cap": 5.0, "sinks": torch.tensor([2.0, 0.0, -3.0])},
    ),
}
_LENGTHS = (700, 1300, 1, 40)
_SHARES = [Share(0, 700, 300), Share(1, 1300, 1), Share(2, 1, 1), Share(3, 40, 40)]


def _attention_line(name: str, context: Context) -> Line:
    heads, options = _ATTENTIONS[name]
    worst, cases = 0.0, 0
    for dtype in context.dtypes:
        sequences = draw_sequences(
            _LENGTHS, heads, dtype, context.device, make_attention_backend, **options
        )
        for share, actual in zip(_SHARES, sequences.attend(_SHARES), strict=True):
            error = _error(actual, sequences.expected(share), _ATTENTION_TOLERANCES)
            worst, cases = max(worst, error), cases + 1
    label = f"paged_attention, {name}"
    return Line((label, str(cases), f"{worst:.2f}"), Verdict.of(worst <= 1.0))


def _moves_line(context: Context) -> Line:
    wrong, cases = 0, 0
    for dtype in context.dtypes:
        storage = torch.randn(40, 3, 1001).to(dtype).to(context.device)
        before, order = storage.clone(), torch.randperm(40)
        gathered = gather_blocks(storage, order[:17])
        storage[order[:17]] = 0
        wrong += not torch.equal(gathered, before[order[:17]])
        scatter_blocks(gathered, storage, order[:17].to(context.device))
        wrong += not torch.equal(storage, before)
        cases += 2
    return Line(("gather_blocks, scatter_blocks", str(cases), str(wrong)), Verdict.of(not wrong))


def _pytest_section(context: Context) -> Section:
    """Run the checks of the tests on this GPU; each file is a line."""
    title, heads = "Checks of tests/kernels/on_device on this GPU", ("file", "outcome")
    if importlib.util.find_spec("pytest") is None:
        note = "pytest is not installed, which these checks need: only the comparisons above ran."
        return Section(title, heads, (), (note,))
    output = _run_pytest(context)
    counts: dict[str, dict[str, int]] = {path.name: {} for path in sorted(CHECKS.glob("check_*"))}
    for outcome, file in re.findall(r"^(\w+) \S*?(check_\w+\.py)", output, re.MULTILINE):
        counts[file][outcome] = counts[file].get(outcome, 0) + 1
    lines = []
    for file, found in counts.items():
        text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()))
        holds = found.keys() == {"PASSED"}
        lines.append(Line((file, text.lower() or "did not run"), Verdict.of(holds)))
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Section(title, heads, tuple(lines), tuple(line[:200] for line in failed[:20]))


def _run_pytest(context: Context) -> str:
    """Return what pytest prints of each test; what runs out of time has no line."""
    # Neither the project's configuration nor all of its fixtures: their packages may be missing.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(CHECKS)]
    command += ["--confcutdir", str(CHECKS.parent), "--import-mode=importlib"]
    command += ["-rA", "-q", "--tb=line", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:  # most of the time is the compiler's
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    files = [str(path) for path in sorted(CHECKS.glob("check_*.py"))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = search_path()
    left_s = max(10.0, min(3600.0, context.deadline_s - time.monotonic()))
    try:
        done = subprocess.run(
            [*command, *files], env=environment, capture_output=True, text=True, timeout=left_s
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return printed.decode() if isinstance(printed, bytes) else printed
    sys.stderr.write(done.stdout[-4000:] + done.stderr[-2000:])
    return done.stdout
