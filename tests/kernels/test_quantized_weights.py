"""Weights of 8 bits: what their elements and scales are, whoever multiplies by them."""

import pytest
import torch

from octavo_kernels import quantize_weight, quantized_types
from octavo_kernels.quantization import EIGHT_BITS, quantize

pytestmark = pytest.mark.kernels
INT8, FP8 = EIGHT_BITS


def draw(dtype):
    """Outputs of very different sizes: one that shares a scale with another is found."""
    return (torch.randn(50, 64) * torch.logspace(-2, 3, 50)[:, None]).to(dtype)


def test_integers_and_scale_give_back_the_values_within_half_a_step(dtype):
    values = draw(dtype)
    integers, scale = quantize(values, INT8)
    assert integers.abs().amax(dim=1).eq(127).all()
    errors = (integers.double() * scale.double() - values.double()).abs()
    assert (errors <= scale.double() * (0.5 + 1e-4)).all()


def test_numbers_of_8_bits_and_scale_give_back_the_values_within_half_of_their_last_bit(dtype):
    values = draw(dtype)
    numbers, scale = quantize(values, FP8)
    assert numbers.float().abs().amax(dim=1).eq(448).all()
    errors = (numbers.double() * scale.double() - values.double()).abs()
    # Three bits behind the first; the smallest step is 2^-9.
    steps = torch.maximum(values.double().abs() * 2**-4, scale.double() * 2**-10)
    assert (errors <= steps * (1 + 1e-4)).all()


def test_ties_are_rounded_to_even_and_nothing_leaves_the_range():
    integers, scale = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -127.0]]), INT8)
    assert scale.item() == 1.0
    assert integers.tolist() == [[127, 0, 2, 2, 0, -127]]
    numbers, scale = quantize(torch.tensor([[-448.0, 17.0, 19.0, 0.0, 448.0]]), FP8)
    assert scale.item() == 1.0
    assert numbers.tolist() == [[-448, 16, 20, 0, 448]]


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_what_is_nearly_nothing_becomes_nothing_and_nan_reaches_its_own_output_alone(kind, dtype):
    weight = draw(dtype)
    expected, expected_scales = quantize_weight(weight, kind)
    weight[3], weight[4, 5], weight[5, 6] = 0, torch.nan, torch.inf
    elements, scales = quantize_weight(weight, kind)
    assert elements[3].float().eq(0).all()
    assert scales.isfinite().tolist() == [row not in (4, 5) for row in range(50)]
    others = [row for row in range(50) if row not in (3, 4, 5)]
    assert torch.equal(elements[others].view(torch.uint8), expected[others].view(torch.uint8))
    assert torch.equal(scales[others], expected_scales[others])


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_a_weight_is_quantised_output_by_output_however_large_it_is(kind, dtype, monkeypatch):
    weight = draw(dtype)
    elements, scales = quantize_weight(weight, kind)
    assert (elements.dtype, scales.dtype) == (kind, torch.float32)
    assert elements.nbytes + scales.nbytes == weight.numel() + 4 * len(weight)
    monkeypatch.setattr("octavo_kernels.quantization._ELEMENTS_AT_ONCE", 3 * 64 + 1)
    again, scales_again = quantize_weight(weight.T.contiguous().T, kind)
    assert torch.equal(again.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(scales_again, scales)
    assert again.is_contiguous()


@pytest.mark.parametrize(
    ("capability", "types"),
    [
        (None, ()),
        (80, (INT8,)),
        (86, (INT8,)),
        (89, EIGHT_BITS),
        (90, EIGHT_BITS),
        (120, EIGHT_BITS),
        ("gfx942", EIGHT_BITS),
        ("gfx90a", (INT8,)),
    ],
)
def test_a_gpu_takes_integers_and_from_a_capability_on_numbers(capability, types, monkeypatch):
    monkeypatch.setattr("octavo_kernels.quantization.gpu_capability", lambda tensor: capability)
    assert quantized_types(torch.device("cpu")) == types
