import pytest
import torch

from octavo_kernels import silu_and_mul, silu_and_mul_reference

pytestmark = pytest.mark.kernels


def test_reference_is_the_formula_in_float64():
    gate, up = torch.randn(2, 5, 33)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    actual = silu_and_mul_reference(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 7, 129])
@pytest.mark.parametrize("inner", [1, 33, 64, 1536])
def test_silu_and_mul_agrees_with_reference(tokens, inner, dtype, assert_near):
    gate_up = (torch.randn(tokens, 2 * inner) * 8).to(dtype)
    assert_near(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


def test_extreme_gates_neither_overflow_nor_lose_nan():
    gates = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, torch.nan])
    actual = silu_and_mul(torch.cat([gates, torch.ones(7)])[None])
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.0, 1e4, torch.nan]])
    torch.testing.assert_close(actual, expected, atol=1e-30, rtol=0, equal_nan=True)


def test_rows_may_be_slices_and_out_is_filled(dtype, make_poisoned):
    wide = torch.randn(5, 300).to(dtype)
    out = make_poisoned(5, 100, dtype=dtype)
    assert silu_and_mul(wide[:, 50:250], out=out) is out
    assert torch.equal(out, silu_and_mul(wide[:, 50:250].clone()))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, threads):
    gate_up = torch.randn(100, 1000).to(dtype)
    whole = silu_and_mul(gate_up)
    for rows in (slice(0, 1), slice(3, 5), slice(30, 97)):
        assert torch.equal(silu_and_mul(gate_up[rows]), whole[rows])


@pytest.mark.parametrize(
    ("gate_up", "out", "message"),
    [
        (torch.ones(2, 5), None, "gate_up has 5 columns but must have an even number"),
        (torch.ones(2, 4), torch.ones(2, 4), r"out has shape \[2, 4\] but must be \[2, 2\]"),
        (torch.ones(2, 4), torch.ones(2, 2).half(), "out is torch.float16 on cpu but must be"),
        (torch.ones(4), None, r"gate_up has shape \[4\] but must be \[any, any\]"),
    ],
)
def test_wrong_arguments_are_refused(gate_up, out, message):
    with pytest.raises(ValueError, match=message):
        silu_and_mul(gate_up, out=out)
