import pytest
import torch

from octavo_kernels import gelu_and_mul_reference, silu_and_mul_reference
from octavo_kernels._launch import choose_gated
from octavo_kernels._triton.gated import launch_gated

REFERENCES = {"silu_and_mul": silu_and_mul_reference, "gelu_and_mul": gelu_and_mul_reference}

pytestmark = pytest.mark.parametrize("name", REFERENCES)


@pytest.mark.parametrize(("tokens", "inner"), [(0, 64), (1, 1), (7, 33), (3, 1024), (2, 1537)])
def test_it_agrees_with_reference(
    name, tokens, inner, dtype, capability, surround, assert_surrounded, assert_near
):
    gate_up = (torch.randn(tokens, 2 * inner) * 4).to(dtype)
    out = surround(torch.zeros(tokens, inner, dtype=dtype))
    launch_gated(name, surround(gate_up), out, choose_gated(capability))
    assert_near(out.cpu(), REFERENCES[name](gate_up))
    assert_surrounded(out)


def test_extreme_gates_neither_overflow_nor_lose_nan(name, capability, device):
    gates = torch.tensor([-1e30, -1e4, -100.0, 0.0, 88.0, 1e4, 1e30, torch.nan])
    out = torch.empty(1, 8, device=device)
    gate_up = torch.cat([gates, torch.ones(8)])[None].to(device)
    launch_gated(name, gate_up, out, choose_gated(capability))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.0, 1e4, 1e30, torch.nan]])
    torch.testing.assert_close(out.cpu(), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
