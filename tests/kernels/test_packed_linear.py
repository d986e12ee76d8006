"""Products with packed weights, by each version of the native code that this machine can run."""

import pytest
import torch

from octavo_kernels import pack_weight, packed_linear
from octavo_kernels._native.library import native_library
from octavo_kernels._native.processor import usable_instruction_sets

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(native_library() is None, reason="this machine builds no native code"),
]

# Inputs and outputs: one; odd; of no whole vector, panel or chunk; more than two chunks of scalars.
SIZES = [(1, 1), (1, 33), (2, 31), (7, 13), (33, 50), (64, 64), (576, 65), (2051, 40)]
# Half of a unit in the last place, relative.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=usable_instruction_sets(), ids=lambda x: x.name)
def instructions(request):
    return request.param


def draw(rows, inputs, outputs, dtype):
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_errors_stay_within_those_of_float32_sums_and_one_rounding(
    inputs, outputs, with_bias, dtype, instructions
):
    x, weight, bias = draw(21, inputs, outputs, dtype)
    bias = bias if with_bias else torch.zeros_like(bias)
    packed = pack_weight(weight, bias if with_bias else None, instructions=instructions)
    exact = x.double() @ weight.double().T + bias.double()
    sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    # Each addition of a float32 sum rounds; float16 is coarser where it is subnormal.
    bound = (inputs + 1) * 2**-24 * sizes + ROUNDING[dtype] * exact.abs() + 2**-25
    assert ((packed_linear(x, packed).double() - exact).abs() <= bound).all()


def test_a_row_has_the_same_bits_with_up_to_seventy_rows_and_across_blocks(dtype, instructions):
    x, weight, bias = draw(450, 130, 70, dtype)
    packed = pack_weight(weight, bias, instructions=instructions)
    everything = packed_linear(x, packed)
    for count in (*range(1, 71), 191, 192, 193, 385):
        assert torch.equal(packed_linear(x[-count:], packed), everything[-count:]), count


@pytest.mark.parametrize("rows", [1, 2, 40, 200])
def test_the_number_of_threads_changes_no_bit(rows, dtype, instructions):
    x, weight, bias = draw(rows, 576, 1000, dtype)
    packed = pack_weight(weight, bias, instructions=instructions)
    expected = packed_linear(x, packed)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        again = pack_weight(weight, bias, instructions=instructions)
        assert torch.equal(again.panels, packed.panels)
        assert torch.equal(packed_linear(x, packed), expected)


@pytest.mark.parametrize("inputs", [64, 63])
def test_how_far_rows_lie_apart_changes_no_bit(inputs, dtype, instructions):
    x, weight, bias = draw(30, inputs, 50, dtype)
    packed = pack_weight(weight, bias, instructions=instructions)
    expected = packed_linear(x, packed)
    # Odd, so that a pair of elements lies anywhere; and what brings rows to the same cache lines.
    for width in (70, 71, 512, 1024, 2048):
        around = torch.full((30, width), torch.nan, dtype=dtype)
        around[:, 1 : 1 + inputs] = x
        assert torch.equal(packed_linear(around[:, 1 : 1 + inputs], packed), expected), width


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 2), (7, 30), (33, 62), (576, 130), (64, 192)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_gated_weight_gives_the_bits_of_a_plain_one(
    inputs, outputs, with_bias, dtype, instructions
):
    x, weight, bias = draw(21, inputs, outputs, dtype)
    bias = bias if with_bias else None
    plain, gated = (
        pack_weight(weight, bias, is_gated=is_gated, instructions=instructions)
        for is_gated in (False, True)
    )
    assert torch.equal(packed_linear(x, gated), packed_linear(x, plain))


@pytest.mark.parametrize("with_bias", [True, False])
def test_float32_receives_the_same_numbers(with_bias, dtype, instructions, make_poisoned):
    x, weight, bias = draw(40, 35, 77, dtype)
    packed = pack_weight(weight, bias if with_bias else None, instructions=instructions)
    around = make_poisoned(40, 90, dtype=torch.float32)
    out = around[:, 5:82]
    assert packed_linear(x, packed, out=out) is out
    assert torch.equal(out, packed_linear(x, packed).float())
    out.zero_()
    assert int(around.isnan().sum()) == 40 * (90 - 77)


def test_nothing_is_read_or_written_outside_the_rows(dtype, instructions, surround, make_poisoned):
    x, weight, bias = draw(17, 35, 45, dtype)
    packed = pack_weight(weight, bias, instructions=instructions)
    expected = packed_linear(x, packed)
    around = make_poisoned(19, 60, dtype=dtype)
    out = around[1:-1, 7:52]
    assert packed_linear(surround(x), packed, out=out) is out
    assert torch.equal(out, expected)
    around[1:-1, 7:52] = 0
    assert int(around.isnan().sum()) == 19 * 60 - 17 * 45


def test_a_row_that_is_not_finite_stays_alone(dtype, instructions):
    x, weight, bias = draw(30, 33, 50, dtype)
    packed = pack_weight(weight, bias, instructions=instructions)
    expected = packed_linear(x, packed)
    x[11, 32], x[12, 0] = torch.nan, torch.inf
    result = packed_linear(x, packed)
    assert not result[11:13].isfinite().any()
    assert torch.equal(result[:11], expected[:11])
    assert torch.equal(result[13:], expected[13:])


def test_no_rows_give_no_rows(dtype):
    packed = pack_weight(torch.randn(4, 3).to(dtype))
    assert packed_linear(torch.empty(0, 3, dtype=dtype), packed).shape == (0, 4)


def test_a_weight_that_native_code_does_not_serve_is_not_packed():
    assert pack_weight(torch.randn(4, 3).double()) is None
    assert pack_weight(torch.randn(4, 3, device="meta")) is None


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"weight has strides \[1, 4\] but its last 2 dimension"):
        pack_weight(torch.randn(3, 4).T)
    with pytest.raises(ValueError, match=r"bias has shape \[3\] but must be \[4\]"):
        pack_weight(torch.randn(4, 3), torch.randn(3))
    with pytest.raises(ValueError, match="weight has 5 outputs but a gated one must have an even"):
        pack_weight(torch.randn(5, 3), is_gated=True)
    packed = pack_weight(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"x has shape \[2, 4\] but must be \[any, 3\]"):
        packed_linear(torch.randn(2, 4), packed)
    with pytest.raises(ValueError, match=r"x is torch.float16 but must be torch.float32"):
        packed_linear(torch.randn(2, 3).half(), packed)
    with pytest.raises(ValueError, match=r"out has shape \[2, 3\] but must be \[2, 4\]"):
        packed_linear(torch.randn(2, 3), packed, out=torch.empty(2, 3))
    with pytest.raises(ValueError, match=r"out is torch.float16 but must be torch.float32"):
        packed_linear(torch.randn(2, 3), packed, out=torch.empty(2, 4).half())
