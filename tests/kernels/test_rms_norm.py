import pytest
import torch

from octavo_kernels import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

pytestmark = pytest.mark.kernels

TOKENS = [1, 7, 129]
HIDDEN = [1, 64, 100, 1024]


def test_reference_is_torchs_own_rms_norm_in_float64():
    x, weight = torch.randn(5, 33), torch.randn(33)
    expected = torch.nn.functional.rms_norm(x.double(), (33,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5).double(), expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm_agrees_with_reference(tokens, hidden, dtype, assert_near):
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden)
    assert_near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_add_rms_norm_agrees_with_reference(tokens, hidden, dtype, assert_near):
    x, residual = torch.randn(2, tokens, hidden).to(dtype)
    weight = torch.randn(hidden)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(normed, add_rms_norm_reference(x, residual, weight, 1e-5)[0])


def test_add_rms_norm_equals_adding_then_rms_norm_to_the_bit(dtype):
    x, residual = torch.randn(2, 9, 100).to(dtype)
    weight = torch.randn(100)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_rms_norm_of_heads_reads_slices_of_a_fused_projection(dtype, assert_near):
    fused = torch.randn(7, 9 * 16).to(dtype)
    heads = fused[:, 32:112].view(7, 5, 16)
    weight = torch.randn(16)
    assert_near(rms_norm(heads, weight, 1e-5), rms_norm_reference(heads, weight, 1e-5))


def test_rms_norm_in_place_of_a_slice_leaves_the_rest_alone(dtype, assert_near):
    fused = torch.randn(7, 9 * 16).to(dtype)
    before = fused.clone()
    heads = fused[:, 32:112].view(7, 5, 16)
    weight = torch.randn(16)
    assert rms_norm(heads, weight, 1e-5, out=heads) is heads
    expected = before.clone()
    expected[:, 32:112] = rms_norm_reference(before[:, 32:112].view(7, 5, 16), weight, 1e-5).view(
        7, 80
    )
    assert_near(fused, expected)
    assert torch.equal(fused[:, :32], before[:, :32])


def test_out_is_filled_and_returned(dtype, make_poisoned):
    x, residual = torch.randn(2, 7, 100).to(dtype)
    weight = torch.randn(100)
    out = make_poisoned(7, 100, dtype=dtype)
    assert rms_norm(x, weight, 1e-5, out=out) is out
    assert torch.equal(out, rms_norm(x, weight, 1e-5))
    expected = add_rms_norm(x, residual, weight, 1e-5)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, out=x, residual_out=residual)
    assert normed is x
    assert total is residual
    assert torch.equal(x, expected[0])
    assert torch.equal(residual, expected[1])


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, threads):
    x, weight = torch.randn(200, 576).to(dtype), torch.randn(576)
    whole = rms_norm(x, weight, 1e-5)
    for rows in (slice(0, 1), slice(3, 5), slice(50, 117)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-5), whole[rows])


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 4), torch.ones(5), r"weight has shape \[5\] but must be \[4\]"),
        (
            torch.ones(2, 4),
            torch.ones(4).half(),
            "weight is torch.float16 but must be torch.float32",
        ),
        (torch.ones(2, 4).int(), torch.ones(4), "x is torch.int32 but must be torch.float32 or"),
        (torch.ones(4, 2).t(), torch.ones(4), r"x has strides \[1, 2\] but its last 1 dimension"),
        (torch.ones(1, 1, 2, 4), torch.ones(4), "x has 4 dimensions but must have 1 to 3"),
    ],
)
def test_wrong_arguments_are_refused(x, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-5)


def test_add_rms_norm_refuses_a_residual_of_another_shape():
    with pytest.raises(ValueError, match=r"residual has shape \[3, 4\] but must be \[2, 4\]"):
        add_rms_norm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-5)
