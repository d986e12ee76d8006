import pytest
import torch

from octavo_kernels import linear, linear_reference, quantize_weight
from octavo_kernels.quantization import EIGHT_BITS

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product_with_the_transposed_weight_in_float64(rows, has_bias, dtype):
    x, weight, bias = torch.randn(rows, 100), torch.randn(15, 100), torch.randn(15)
    x, weight, bias = (tensor.to(dtype) for tensor in (x, weight, bias))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    actual = linear(x, weight, bias if has_bias else None)
    assert actual.dtype == dtype
    # One rounding of the result, and of some hundred sums in float32.
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=relative)


def test_rows_may_be_slices_and_out_is_filled(dtype, make_poisoned):
    wide = make_poisoned(5, 40, dtype=dtype)
    x, weight = wide[:, 3:36], torch.randn(12, 33).to(dtype)
    x.copy_(torch.randn(5, 33))
    whole = make_poisoned(5, 20, dtype=dtype)
    out = whole[:, 4:16]
    assert linear(x, weight, out=out) is out
    assert torch.equal(out, linear(x.contiguous(), weight))
    assert bool(whole[:, :4].isnan().all())
    assert bool(whole[:, 16:].isnan().all())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(576, 960), (1536, 576), (33, 50), (53, 7)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(sizes, has_bias, dtype):
    in_features, out_features = sizes
    x, weight = torch.randn(100, in_features).to(dtype), torch.randn(sizes[::-1]).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    whole = linear(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 41), slice(68, 100)):
        assert torch.equal(linear(x[rows], weight, bias), whole[rows])


def test_the_reference_agrees_with_it_to_the_bit_where_sums_are_exact(dtype):
    x, weight, bias = torch.randn(5, 70), torch.randn(9, 70), torch.randn(9)
    arguments = [tensor.to(dtype) for tensor in (x, weight, bias)]
    arguments = [(tensor * 2).round() / 2 for tensor in arguments]
    assert torch.equal(linear(*arguments), linear_reference(*arguments))


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_of_8_bits_is_what_its_elements_times_its_scales_are(kind, has_bias, dtype):
    x, weight, bias = torch.randn(7, 100).to(dtype), torch.randn(15, 100), torch.randn(15)
    bias = bias.to(dtype) if has_bias else None
    elements, scales = quantize_weight(weight, kind)
    exact = elements.double() * scales.double()[:, None]
    expected = x.double() @ exact.T + (bias.double() if has_bias else 0)
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for multiply in (linear, linear_reference):
        actual = multiply(x, elements, bias, scales=scales)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=relative)


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_with_a_weight_of_8_bits(kind, dtype):
    x, bias = torch.randn(100, 576).to(dtype), torch.randn(9).to(dtype)
    elements, scales = quantize_weight(torch.randn(9, 576), kind)
    whole = linear(x, elements, bias, scales=scales)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 41), slice(68, 100)):
        assert torch.equal(linear(x[rows], elements, bias, scales=scales), whole[rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4)}, r"^linear: x has shape \[4\] but must be \[any, any\]$"),
        ({"x": torch.ones(3, 4).long()}, "^linear: x is torch.int64 but must be torch.float32 or"),
        ({"x": torch.ones(4, 3).T}, r"^linear: x has strides \[1, 3\] but its last 1 dimension"),
        (
            {"weight": torch.ones(5, 3)},
            r"^linear: weight has shape \[5, 3\] but must be",
        ),
        ({"weight": torch.ones(5, 4).half()}, "^linear: weight is torch.float16 on cpu but must"),
        (
            {"weight": torch.ones(5, 6)[:, :4]},
            r"^linear: weight has strides \[6, 1\] but its last",
        ),
        ({"weight": torch.ones(5, 4).char()}, "^linear: weight is torch.int8 on cpu but must be"),
        (
            {"scales": torch.ones(5)},
            "^linear: weight is torch.float32 but must be torch.int8 or torch.float8_e4m3fn$",
        ),
        (
            {"weight": torch.ones(5, 4).char(), "scales": torch.ones(4)},
            r"^linear: scales has shape \[4\] but must be \[5\]$",
        ),
        (
            {"weight": torch.ones(5, 4).char(), "scales": torch.ones(5).half()},
            "^linear: scales is torch.float16 but must be torch.float32$",
        ),
        ({"bias": torch.ones(4)}, r"^linear: bias has shape \[4\] but must be \[5\]$"),
        ({"out": torch.ones(3, 4)}, r"^linear: out has shape \[3, 4\] but must be \[3, 5\]$"),
    ],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = {"x": torch.ones(3, 4), "weight": torch.ones(5, 4), "bias": None, "out": None}
    with pytest.raises(ValueError, match=message):
        linear(**(arguments | change))
