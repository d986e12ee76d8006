"""The GPU's kernels without a GPU: in the interpreter of their language, and as machine code."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the Triton language is not installed"
    ),
]

FOLDER = Path(__file__).parent
COMMITTED_TABLE = FOLDER.parents[1] / "docs" / "kernel-table.md"

#: Shared memory that a program may have, by architecture, in bytes.
SHARED_LIMITS = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, "gfx942": 65_536}


def test_kernels_agree_with_their_references_in_the_interpreter():
    # A process of its own: whether kernels are interpreted is decided when the language is
    # imported. Its numpy warns where a kernel means to overflow, as in e^x of a large x.
    command = "-m pytest -q -p no:cacheprovider -W ignore:overflow:RuntimeWarning".split()
    checks = sorted(map(str, FOLDER.glob("on_device/check_*.py")))
    done = subprocess.run(
        [sys.executable, *command, *checks],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def usage():
    """Compile everything for every architecture."""
    from octavo_kernels._triton.catalog import compile_catalog

    return compile_catalog()


def test_no_kernel_spills_registers(usage):
    spilled = {
        (name, architecture): used.stack_bytes
        for name, by_architecture in usage.items()
        for architecture, used in by_architecture.items()
        if used.stack_bytes
    }
    assert spilled == {}


def test_every_kernel_fits_the_shared_memory_of_its_architecture(usage):
    outgrown = {
        (name, architecture): used.shared_bytes
        for name, by_architecture in usage.items()
        for architecture, used in by_architecture.items()
        if used.shared_bytes > SHARED_LIMITS[architecture]
    }
    assert outgrown == {}


def test_however_many_rows_a_product_has_they_run_on_one_matrix_instruction(usage):
    instructions: dict[tuple, set[str]] = {}
    orders: dict[tuple, set[str]] = {}
    for name, by_architecture in usage.items():
        kernel, dtype, *_ = name.split()
        if kernel in ("linear", "grouped_linear"):
            for architecture, used in by_architecture.items():
                key = (dtype, architecture, kernel)
                instructions.setdefault(key, set()).update(used.matrix_instructions)
                orders.setdefault(key, set()).update(used.input_orders)
    # NVIDIA's have none for full float32.
    expected = {
        key: 0 if key[0].startswith("fp32") and key[1] != "gfx942" else 1 for key in instructions
    }
    assert {key: len(names) for key, names in instructions.items()} == expected
    assert max(map(len, orders.values())) == 1


def test_the_committed_table_is_what_scripts_kernel_table_writes(usage):
    from octavo_kernels._triton.catalog import usage_table

    assert COMMITTED_TABLE.read_text(encoding="utf-8") == usage_table(usage)
