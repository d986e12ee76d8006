"""Products of 8-bit integers: native code, by any instructions, has the bits of the reference."""

import pytest
import torch

from octavo_kernels import int8_linear_reference, pack_weight, packed_linear, packs_weights
from octavo_kernels._native.library import native_library
from octavo_kernels._native.processor import usable_instruction_sets
from octavo_kernels.quantization import quantize

pytestmark = pytest.mark.kernels
needs_native = pytest.mark.skipif(native_library() is None, reason="no native code is built here")

# Inputs and outputs: one; odd; of no whole lane, group or panel; whole ones; many groups.
SIZES = [(1, 1), (3, 33), (63, 31), (64, 64), (65, 13), (127, 50), (576, 65), (2051, 40)]


@pytest.fixture(params=usable_instruction_sets() if native_library() else [], ids=lambda x: x.name)
def instructions(request):
    return request.param


def draw(rows, inputs, outputs, dtype):
    """Rows and outputs of very different sizes: what shares a scale that it must not is found."""
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    weight = torch.randn(outputs, inputs) * torch.logspace(-2, 1, outputs)[:, None]
    return x.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype)


def pack(weight, bias, instructions, **options):
    return pack_weight(weight, bias, to_int8=True, instructions=instructions, **options)


def test_the_reference_multiplies_the_integers_exactly(dtype):
    x, weight, bias = draw(20, 200, 30, dtype)
    weights, weight_scales = quantize(weight, torch.int8)
    exact = bias.double().expand(20, 30).clone()
    sizes = bias.double().abs().expand(20, 30).clone()
    for first in range(0, 200, 64):
        integers, scales = quantize(x[:, first : first + 64], torch.int8)
        products = integers.double() @ weights[:, first : first + 64].double().T
        exact += products * scales.double() * weight_scales.double().T
        sizes += products.abs() * scales.double() * weight_scales.double().T
    roundings = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    errors = (int8_linear_reference(x, weight, bias).double() - exact).abs()
    finite = exact.abs() <= torch.finfo(dtype).max  # a result may be too large for float16
    assert (errors <= 2**-20 * sizes + roundings[dtype] * exact.abs() + 2**-25)[finite].all()


@needs_native
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_native_code_has_the_bits_of_the_reference(inputs, outputs, with_bias, dtype, instructions):
    x, weight, bias = draw(31, inputs, outputs, dtype)
    bias = bias if with_bias else None
    expected = int8_linear_reference(x, weight, bias)
    assert torch.equal(packed_linear(x, pack(weight, bias, instructions)), expected)


@needs_native
def test_a_sum_of_the_largest_integers_is_exact(instructions):
    x, weight = torch.ones(3, 70_000), -torch.ones(33, 70_000)
    assert packed_linear(x, pack(weight, None, instructions)).eq(-70_000).all()


@needs_native
def test_a_row_has_the_same_bits_with_any_number_of_rows(dtype, instructions):
    x, weight, bias = draw(450, 130, 70, dtype)
    packed = pack(weight, bias, instructions)
    everything = packed_linear(x, packed)
    for count in (*range(1, 71), 191, 192, 193, 385):
        assert torch.equal(packed_linear(x[-count:], packed), everything[-count:]), count


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 40, 200])
def test_the_number_of_threads_changes_no_bit(rows, dtype, instructions):
    x, weight, bias = draw(rows, 576, 1000, dtype)
    packed = pack(weight, bias, instructions)
    expected = packed_linear(x, packed)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(pack(weight, bias, instructions).panels, packed.panels)
        assert torch.equal(packed_linear(x, packed), expected)


@needs_native
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 2), (33, 62), (576, 130)])
def test_a_gated_weight_gives_the_bits_of_a_plain_one(inputs, outputs, dtype, instructions):
    x, weight, bias = draw(21, inputs, outputs, dtype)
    plain, gated = (pack(weight, bias, instructions, is_gated=each) for each in (False, True))
    assert torch.equal(packed_linear(x, gated), packed_linear(x, plain))


@needs_native
def test_nothing_is_read_or_written_outside_the_rows(dtype, instructions, surround, make_poisoned):
    x, weight, bias = draw(17, 35, 45, dtype)
    packed = pack(weight, bias, instructions)
    expected = packed_linear(x, packed)
    around = make_poisoned(19, 60, dtype=dtype)
    out = around[1:-1, 7:52]
    assert packed_linear(surround(x), packed, out=out) is out
    assert torch.equal(out, expected)
    around[1:-1, 7:52] = 0
    assert int(around.isnan().sum()) == 19 * 60 - 17 * 45


@needs_native
def test_float32_receives_the_same_numbers(dtype, instructions):
    x, weight, bias = draw(40, 35, 77, dtype)
    packed = pack(weight, bias, instructions)
    out = packed_linear(x, packed, out=torch.empty(40, 77))
    assert torch.equal(out, packed_linear(x, packed).float())


@needs_native
def test_a_row_that_is_not_finite_stays_alone(dtype, instructions):
    x, weight, bias = draw(30, 133, 50, dtype)
    packed = pack(weight, bias, instructions)
    expected = packed_linear(x, packed)
    x[11, 132], x[12, 0], x[13, 70] = torch.nan, torch.inf, -torch.inf
    result = packed_linear(x, packed)
    assert not result[11:14].isfinite().any()
    assert torch.equal(result[:11], expected[:11])
    assert torch.equal(result[14:], expected[14:])


@needs_native
def test_rows_and_outputs_of_zeros_or_next_to_nothing_give_the_bias(instructions):
    x, weight, bias = draw(4, 100, 20, torch.float32)
    x[0], x[1], weight[5], weight[6] = 0, 1e-40, 0, 1e-40
    result = packed_linear(x, pack(weight, bias, instructions))
    assert torch.equal(result[:2], bias.expand(2, 20))
    assert torch.equal(result[:, 5:7], bias[5:7].expand(4, 2))


@needs_native
def test_a_weight_takes_a_byte_an_element_and_four_an_output(dtype):
    packed = pack_weight(torch.randn(640, 576).to(dtype), to_int8=True)
    assert packed.panels.nbytes == 640 * (576 + 4)


def test_only_float_dtypes_of_a_cpu_are_packed():
    cpu = torch.device("cpu")
    assert packs_weights(torch.bfloat16, cpu) is (native_library() is not None)
    assert not packs_weights(torch.float64, cpu)
    assert not packs_weights(torch.bfloat16, torch.device("cuda"))
    assert pack_weight(torch.randn(4, 3).double(), to_int8=True) is None
