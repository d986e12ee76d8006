"""Which path a tensor takes, and what must be installed for it."""

import subprocess
import sys

import pytest
import torch

from octavo_kernels._choice import gpu_capability

pytestmark = pytest.mark.kernels

WITHOUT_THE_LANGUAGE = """
import sys
sys.modules["triton"] = None
import torch
import octavo_kernels
x = torch.ones(1, 4)
print(octavo_kernels.rms_norm(x, x[0], 0.0).tolist())
"""

ASKING_FOR_NOTHING = """
import sys
import octavo_kernels
print([name for name in sys.modules if name.split(".")[0] == "triton"])
"""


def output_of(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_a_tensor_on_the_cpu_has_no_gpu_capability():
    assert gpu_capability(torch.ones(1)) is None


def test_the_package_works_without_the_language_of_gpu_kernels():
    assert output_of(WITHOUT_THE_LANGUAGE) == "[[1.0, 1.0, 1.0, 1.0]]\n"


def test_importing_the_package_does_not_import_the_language():
    assert output_of(ASKING_FOR_NOTHING) == "[]\n"
