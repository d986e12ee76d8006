import pytest
import torch

from octavo_kernels import gelu_and_mul, gelu_and_mul_reference

pytestmark = pytest.mark.kernels


def formula(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-((8 / torch.pi) ** 0.5) * (gate + 0.044715 * gate**3))) * up


def test_reference_is_the_formula_in_float64():
    gate_up = torch.randn(5, 66)
    actual = gelu_and_mul_reference(gate_up)
    torch.testing.assert_close(actual.double(), formula(gate_up), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 7, 129])
@pytest.mark.parametrize("inner", [1, 33, 64, 1536])
def test_gelu_and_mul_agrees_with_reference(tokens, inner, dtype, assert_near):
    # Gates within 2: further left the reference loses digits, where it adds 1 to a tanh near -1.
    gate_up = torch.randn(tokens, 2 * inner).clamp(-2, 2).to(dtype)
    assert_near(gelu_and_mul(gate_up), gelu_and_mul_reference(gate_up))


def test_large_gates_on_either_side_are_near_the_formula_in_float64():
    gate_up = torch.cat([torch.linspace(-12, 12, 999), torch.randn(999)])[None]
    expected = formula(gate_up).float()
    torch.testing.assert_close(gelu_and_mul(gate_up), expected, atol=2e-6, rtol=2e-5)


def test_extreme_gates_neither_overflow_nor_lose_nan():
    gates = torch.tensor([-1e4, -100.0, 0.0, 88.0, 1e4, 1e30, torch.nan])
    actual = gelu_and_mul(torch.cat([gates, torch.ones(7)])[None])
    expected = torch.tensor([[0.0, 0.0, 0.0, 88.0, 1e4, 1e30, torch.nan]])
    torch.testing.assert_close(actual, expected, atol=1e-30, rtol=0, equal_nan=True)


def test_rows_may_be_slices_and_out_is_filled(dtype, make_poisoned):
    wide = torch.randn(5, 300).to(dtype)
    out = make_poisoned(5, 100, dtype=dtype)
    assert gelu_and_mul(wide[:, 50:250], out=out) is out
    assert torch.equal(out, gelu_and_mul(wide[:, 50:250].clone()))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, threads):
    gate_up = torch.randn(100, 1000).to(dtype)
    whole = gelu_and_mul(gate_up)
    for rows in (slice(0, 1), slice(3, 5), slice(30, 97)):
        assert torch.equal(gelu_and_mul(gate_up[rows]), whole[rows])


def test_an_odd_number_of_columns_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"^gelu_and_mul: gate_up has 5 columns but must have an"):
        gelu_and_mul(torch.ones(2, 5))
