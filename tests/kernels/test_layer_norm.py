import pytest
import torch

from octavo_kernels import layer_norm, layer_norm_reference

pytestmark = pytest.mark.kernels


def factors(hidden):
    return torch.randn(hidden), torch.randn(hidden)


def test_reference_is_torchs_own_layer_norm_in_float64():
    x, (weight, bias) = torch.randn(5, 33) + 3, factors(33)
    expected = torch.nn.functional.layer_norm(
        x.double(), (33,), weight.double(), bias.double(), 1e-5
    )
    # Near a mean of 3 float32 is as coarse as 2.4e-7, and a few such roundings add up.
    actual = layer_norm_reference(x, weight, bias, 1e-5).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("hidden", [1, 64, 100, 1024])
def test_layer_norm_agrees_with_reference(tokens, hidden, dtype, assert_near):
    # Far from zero: a mean of what lies past a row would show.
    x, scales = (torch.randn(tokens, hidden) + 4).to(dtype), factors(hidden)
    assert_near(layer_norm(x, *scales, 1e-5), layer_norm_reference(x, *scales, 1e-5))


def test_slices_are_normalised_in_place_and_the_rest_is_left_alone(dtype, assert_near):
    fused = torch.randn(7, 9 * 16).to(dtype)
    before, scales = fused.clone(), factors(16)
    heads = fused[:, 32:112].view(7, 5, 16)
    expected = layer_norm_reference(heads, *scales, 1e-5)
    assert layer_norm(heads, *scales, 1e-5, out=heads) is heads
    assert_near(heads.contiguous(), expected)
    assert torch.equal(fused[:, :32], before[:, :32])
    assert torch.equal(fused[:, 112:], before[:, 112:])


def test_out_is_filled_and_returned(dtype, make_poisoned):
    x, scales = torch.randn(7, 100).to(dtype), factors(100)
    out = make_poisoned(7, 100, dtype=dtype)
    assert layer_norm(x, *scales, 1e-5, out=out) is out
    assert torch.equal(out, layer_norm(x, *scales, 1e-5))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, threads):
    x, scales = torch.randn(200, 577).to(dtype), factors(577)
    whole = layer_norm(x, *scales, 1e-5)
    for rows in (slice(0, 1), slice(3, 5), slice(50, 117)):
        assert torch.equal(layer_norm(x[rows], *scales, 1e-5), whole[rows])


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(5), torch.ones(4), r"weight has shape \[5\] but must be \[4\]"),
        (torch.ones(4), torch.ones(4).half(), "bias is torch.float16 but must be torch.float32"),
    ],
)
def test_wrong_factors_are_refused(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(torch.ones(2, 4), weight, bias, 1e-5)
