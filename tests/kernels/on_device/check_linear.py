import os

import pytest
import torch

from octavo_kernels import linear_reference, quantize_weight
from octavo_kernels._linear_launch import (
    LinearConfig,
    RowTile,
    adds_in_registers,
    choose_linear,
)
from octavo_kernels._triton.linear import launch_linear

TILES = (RowTile(rows=16, num_warps=4, num_stages=2), RowTile(rows=32, num_warps=4, num_stages=2))
SMALL = LinearConfig(columns=16, depth=64, programs=4, tiles=TILES)

# (absolute, relative) allowed against float64: sums of some hundred terms in float32, and one
# rounding of the result.
_TOLERANCES = {
    torch.float32: (2e-4, 1e-5),
    torch.float16: (2e-4, 2**-10),
    torch.bfloat16: (2e-4, 2**-7),
}

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Products of bfloat16 are wrong in the interpreter.
_DTYPES = [torch.float32, torch.float16, *([] if _IS_INTERPRETED else [torch.bfloat16])]


@pytest.fixture(params=_DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def draw(device):
    """Draw x, weight and bias; in the interpreter, that sums in any order are exact.

    Its products come from numpy, which does not sum all rows alike.
    """

    def make(rows: int, in_features: int, out_features: int, dtype: torch.dtype):
        sizes = ((rows, in_features), (out_features, in_features), (out_features,))
        if _IS_INTERPRETED:
            return tuple(torch.randint(-2, 3, size).to(dtype) for size in sizes)
        return tuple(torch.randn(size).to(dtype).to(device) for size in sizes)

    return make


def compute(x, weight, bias=None, config=SMALL, scales=None):
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype, device=x.device)
    launch_linear(x, weight, bias, out, config, scales)
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(0, 8, 8), (1, 1, 1), (7, 33, 15), (33, 100, 17), (40, 64, 70), (2, 1030, 20), (70, 1100, 20)],
)
def test_it_agrees_with_float64_and_touches_nothing_around(
    rows, in_features, out_features, has_bias, dtype, surround, assert_surrounded
):
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    x, weight, bias = (t.to(dtype) for t in (x, weight, torch.randn(out_features)))
    placed, out = surround(x), surround(torch.zeros(rows, out_features, dtype=dtype))
    on_device = bias.to(placed.device) if has_bias else None
    launch_linear(placed, weight.to(placed.device), on_device, out, SMALL)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    absolute, relative = _TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=absolute, rtol=relative)
    assert_surrounded(out)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(1100, 20), (1040, 24), (70, 70)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    in_features, out_features, has_bias, dtype, draw
):
    x, weight, bias = draw(100, in_features, out_features, dtype)
    bias = bias if has_bias else None
    assert adds_in_registers(SMALL, 1, out_features) == (out_features == 70)
    assert adds_in_registers(SMALL, 100, out_features)
    whole = compute(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 19), slice(16, 48), slice(57, 100)):
        assert torch.equal(compute(x[rows], weight, bias), whole[rows])


@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "has_bias"),
    [(1, 1, 1, False), (7, 33, 15, True), (2, 1030, 20, False), (70, 1100, 20, True)],
)
def test_a_weight_of_8_bits_is_its_elements_times_its_scales(
    rows, in_features, out_features, has_bias, dtype, kind, surround, assert_surrounded
):
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    x, bias = (t.to(dtype) for t in (x, torch.randn(out_features)))
    elements, scales = quantize_weight(weight, kind)
    placed, out = surround(x), surround(torch.zeros(rows, out_features, dtype=dtype))
    device = placed.device
    on_device = bias.to(device) if has_bias else None
    launch_linear(placed, elements.to(device), on_device, out, SMALL, scales.to(device))
    exact = elements.double() * scales.double()[:, None]
    expected = x.double() @ exact.T + (bias.double() if has_bias else 0)
    absolute, relative = _TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=absolute, rtol=relative)
    assert_surrounded(out)


@pytest.mark.parametrize(("in_features", "out_features"), [(1100, 20), (70, 70)])
def test_a_row_has_the_same_bits_in_any_batch_with_a_weight_of_8_bits(
    in_features, out_features, dtype, kind, draw
):
    x, weight, bias = draw(100, in_features, out_features, dtype)
    elements, scales = (weight * 10).to(kind), torch.rand(out_features, device=x.device)
    whole = compute(x, elements, bias, scales=scales)
    for rows in (slice(0, 1), slice(3, 19), slice(57, 100)):
        assert torch.equal(compute(x[rows], elements, bias, scales=scales), whole[rows])


@pytest.mark.parametrize("rows", [1, 40])
def test_a_weight_that_8_bits_hold_has_the_bits_of_the_plain_product(rows, dtype, kind, device):
    x, bias = torch.randint(-2, 3, (rows, 1100)), torch.randint(-2, 3, (20,))
    weight, scales = torch.randint(-7, 8, (20, 1100)), 2.0 ** torch.randint(-3, 3, (20,))
    plain = weight * scales[:, None]
    x, bias, plain = (tensor.to(dtype).to(device) for tensor in (x, bias, plain))
    elements = weight.to(kind).to(device)
    actual = compute(x, elements, bias, scales=scales.to(device))
    assert torch.equal(actual, compute(x, plain, bias))


# A model's sizes; in the interpreter, which is slow, two pieces.
_CHOSEN = [(1100, 200)] if _IS_INTERPRETED else [(4096, 4096), (14336, 1024), (576, 960)]


@pytest.mark.parametrize(("in_features", "out_features"), _CHOSEN)
def test_every_tile_and_way_of_adding_gives_the_same_bits(
    in_features, out_features, dtype, capability, draw
):
    config = choose_linear(dtype.itemsize, capability)
    most, counts = 4000, [1, 2, 16, 17, 63, 64, 65, 128, 129, 500, 3000]
    if _IS_INTERPRETED:
        most, counts = 2, [1, 20, 65]
    x, weight, bias = draw(most + 200, in_features, out_features, dtype)
    whole = compute(x, weight, bias, config)
    for count in counts:
        for first in (0, most):
            rows = slice(first, first + count)
            assert torch.equal(compute(x[rows], weight, bias, config), whole[rows])
    absolute, relative = _TOLERANCES[dtype]
    expected = x[:200].double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole[:200].double(), expected, atol=absolute, rtol=relative)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_rows_that_are_not_finite_spoil_no_other(dtype, draw):
    x, weight, bias = draw(20, 1100, 20, dtype)
    expected = compute(x, weight, bias)
    x[4], x[9] = torch.nan, torch.inf
    out = compute(x, weight, bias)
    fine = [i for i in range(20) if i not in (4, 9)]
    assert torch.equal(out[fine], expected[fine])
    assert bool(out[4].isnan().all())


def test_offsets_past_32_bits_reach_the_right_rows(device):
    stride, rows = 2**30, 3
    memory = torch.empty((rows - 1) * stride + 40, dtype=torch.float16, device=device)
    x = memory.as_strided((rows, 40), (stride, 1))
    x.copy_(torch.randint(-2, 3, (rows, 40)))
    weight = torch.randint(-2, 3, (24, 40)).half().to(device)
    expected = linear_reference(x, weight)
    assert torch.equal(compute(x, weight), expected)
    out = memory.as_strided((rows, 24), (stride, 1))
    launch_linear(x.clone(), weight, None, out, SMALL)
    assert torch.equal(out, expected)
