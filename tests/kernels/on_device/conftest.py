"""Checks of the GPU's kernels on a GPU, or in their language's interpreter: TRITON_INTERPRET=1.

Their files are named check_*.py, so that a plain run of the tests does not collect them:
test_gpu_kernels.py runs them in the interpreter, which a process has for good or not at all.
"""

import importlib
import math
import os

import pytest
import torch

from octavo_kernels._launch import COMPILED_CAPABILITIES
from octavo_kernels.quantization import EIGHT_BITS, types_of_weights

# (absolute, relative) allowed between a kernel and its reference, both float32 inside. The absolute
# one: sums differ in order, and gelu's reference loses digits where it adds 1 to a tanh near -1.
_TOLERANCES = {
    # A GPU approximates e^x and divisions to two units in the last place.
    torch.float32: (4e-6, 2e-5),
    # A GPU rounds the result once, which may fall either way; the interpreter cuts bfloat16 off.
    torch.bfloat16: (4e-6, 2**-7),
    torch.float16: (4e-6, 2**-10),
}


@pytest.fixture
def assert_near():
    """Compare a result with its reference by the table above."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        absolute, relative = _TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative)

    return compare


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def capability(device) -> int:
    """Give the newest architecture in the interpreter, which runs the code of any alike."""
    if device.type == "cpu":
        return COMPILED_CAPABILITIES[-1]
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@pytest.fixture
def as_on_a_gpu(device, capability, monkeypatch):
    """Let the interpreter's tensors, which lie on the CPU, take the path of a GPU's."""

    def choose(module: str) -> None:
        if device.type == "cpu":
            chosen = importlib.import_module(f"octavo_kernels.{module}")
            monkeypatch.setattr(chosen, "gpu_capability", lambda tensor: capability)

    return choose


@pytest.fixture(params=EIGHT_BITS, ids=str)
def kind(request, capability) -> torch.dtype:
    """Give the types of 8 bits that weights may have on the device."""
    if request.param not in types_of_weights(capability):
        pytest.skip(f"the language converts no {request.param} on {capability}")
    return request.param


@pytest.fixture
def draw_addends(device):
    """Draw two tensors to be added; in the interpreter, that any type holds the sum exactly.

    It cuts bfloat16 off where a GPU rounds.
    """

    def draw(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        addends = torch.randn(2, *shape)
        if device.type == "cpu":
            addends = (addends.clamp(-4, 4) * 16).round() / 16
        first, second = addends.to(dtype)
        return first, second

    return draw


@pytest.fixture
def surround(device):
    """Place rows in the middle of NaN: whoever reads outside them, or writes there, is found."""

    def place(rows: torch.Tensor, before: int = 3, after: int = 5) -> torch.Tensor:
        """Return a view equal to rows [tokens, ...], in a larger tensor of NaN."""
        tokens, width = len(rows), rows[:1].numel()
        whole = torch.full(
            (tokens + 2, before + width + after), math.nan, dtype=rows.dtype, device=device
        )
        view = whole[1:-1, before : before + width].view(rows.shape)
        view.copy_(rows)
        return view

    return place


@pytest.fixture
def assert_surrounded():
    """Check that all memory around a view of `surround` is still NaN."""

    def check(view: torch.Tensor) -> None:
        whole = view._base
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        assert bool(whole[outside].isnan().all())

    return check
