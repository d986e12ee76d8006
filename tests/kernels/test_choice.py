"""Which path a tensor takes, and what must be installed for it."""

import os
import subprocess
import sys

import pytest
import torch

from octavo_kernels._choice import amd_architecture, gpu_capability

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


# What is asked for is where the tensor lies; this machine need not have a GPU.
CHOICE_FOR_A_GPU = """
import types
import torch
from octavo_kernels._choice import gpu_capability
print(gpu_capability(types.SimpleNamespace(device=torch.device("cuda"))))
"""


def output_of(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_tensor_on_the_cpu_has_no_gpu_capability():
    assert gpu_capability(torch.ones(1)) is None


@pytest.mark.parametrize("name", ["gfx942", "gfx942:sramecc+:xnack-"])
def test_an_amd_gpu_is_known_by_its_architecture_without_its_features(name):
    assert amd_architecture(name) == "gfx942"


def test_the_package_works_without_the_language_of_gpu_kernels():
    assert output_of(WITHOUT_THE_LANGUAGE) == "[[1.0, 1.0, 1.0, 1.0]]\n"


def test_importing_the_package_does_not_import_the_language():
    assert output_of(ASKING_FOR_NOTHING) == "[]\n"


def test_a_gpus_tensor_is_computed_in_plain_torch_where_that_is_asked_for():
    assert output_of(CHOICE_FOR_A_GPU, OCTAVO_KERNELS="reference") == "None\n"


def test_a_gpus_tensor_is_computed_in_plain_torch_without_the_language_and_a_warning_says_so():
    code = 'import logging, sys\nsys.modules["triton"] = None\n' + (
        "logging.basicConfig(stream=sys.stdout)\n" + CHOICE_FOR_A_GPU
    )
    warning, choice = output_of(code).splitlines()
    assert warning.endswith(
        "using slow torch operations on the GPU: the Triton language is missing"
    )
    assert choice == "None"
