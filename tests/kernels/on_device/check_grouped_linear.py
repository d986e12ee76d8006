import os

import pytest
import torch

from octavo_kernels import grouped_linear_reference, quantize_weight
from octavo_kernels._linear_launch import LinearConfig, RowTile, choose_linear
from octavo_kernels._triton.grouped_linear import launch_grouped_linear

TILES = (RowTile(rows=16, num_warps=4, num_stages=2), RowTile(rows=32, num_warps=4, num_stages=2))
SMALL = LinearConfig(columns=16, depth=64, programs=4, tiles=TILES)

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Products of bfloat16 are wrong in the interpreter.
_DTYPES = [torch.float32, torch.float16, *([] if _IS_INTERPRETED else [torch.bfloat16])]
# Groups without rows at both ends and in the middle, of one row, and of more than a block; rows
# before the first group and after the last are of none.
STARTS = [2, 2, 3, 40, 40, 40, 57, 57]
ROWS = 60


@pytest.fixture(params=_DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def draw(device):
    """Draw x and weights; in the interpreter, that sums in any order are exact.

    Its products come from numpy, which does not sum all rows alike.
    """

    def make(groups: int, in_features: int, out_features: int, dtype: torch.dtype):
        sizes = ((ROWS, in_features), (groups, out_features, in_features))
        if _IS_INTERPRETED:
            return tuple(torch.randint(-2, 3, size).to(dtype) for size in sizes)
        return tuple(torch.randn(size).to(dtype).to(device) for size in sizes)

    return make


def compute(x, weight, starts, config=SMALL, scales=None):
    out = torch.full((len(x), weight.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    launch_grouped_linear(x, weight, torch.tensor(starts, device=x.device), out, config, scales)
    return out


@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (33, 15), (100, 40), (130, 7)])
def test_it_agrees_with_the_reference_and_touches_nothing_around(
    in_features, out_features, dtype, device, surround, assert_surrounded, assert_near
):
    x, weight = torch.randn(ROWS, in_features), torch.randn(7, out_features, in_features)
    x, weight, starts = x.to(dtype) / 8, weight.to(dtype) / 8, torch.tensor(STARTS)
    placed = surround(x)
    out = surround(torch.full((ROWS, out_features), 9, dtype=dtype))
    launch_grouped_linear(placed, weight.to(device), starts.to(device), out, SMALL)
    expected = grouped_linear_reference(x, weight, starts)
    expected[:2], expected[57:] = 9, 9
    assert_near(out.cpu(), expected)
    assert_surrounded(out)


def test_a_row_has_the_same_bits_alone_in_any_group_and_by_any_tile(dtype, draw):
    x, weight = draw(7, 100, 40, dtype)
    whole = compute(x, weight, STARTS)
    for row, group in ((2, 1), (3, 2), (39, 2), (56, 5)):
        alone = [0] * (group + 1) + [1] * (7 - group)
        assert torch.equal(compute(x[row : row + 1], weight, alone)[0], whole[row])
    # One group of them all: more rows a group choose the other tile.
    expected = compute(x[3:40], weight[2:3], [0, 37])
    assert torch.equal(expected, whole[3:40])


def test_weights_of_8_bits_have_the_scales_of_their_own_group(dtype, kind, device, assert_near):
    x, weight = torch.randn(ROWS, 100).to(dtype) / 8, torch.randn(7, 40, 100) / 8
    quantized = [quantize_weight(each * 2**group, kind) for group, each in enumerate(weight)]
    elements, scales = (torch.stack(tensors) for tensors in zip(*quantized, strict=True))
    on_device = elements.to(device), STARTS, SMALL, scales.to(device)
    expected = grouped_linear_reference(x, elements, torch.tensor(STARTS), scales)
    assert_near(compute(x.to(device), *on_device)[2:57].cpu(), expected[2:57])


def test_a_row_has_the_same_bits_by_any_tile_with_weights_of_8_bits(dtype, kind, draw):
    x, weight = draw(7, 100, 40, dtype)
    elements, scales = weight.to(kind), torch.rand(7, 40, device=weight.device)
    whole = compute(x, elements, STARTS, scales=scales)
    actual = compute(x[3:40], elements[2:3], [0, 37], scales=scales[2:3])
    assert torch.equal(actual, whole[3:40])


def test_more_groups_than_are_counted_at_once(dtype, draw):
    x, weight = draw(300, 20, 17, dtype)
    starts = [min(group // 4, ROWS) for group in range(301)]
    expected = grouped_linear_reference(x.cpu(), weight.cpu(), torch.tensor(starts))
    actual = compute(x, weight, starts).cpu()
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2**-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_rows_that_are_not_finite_spoil_no_other(dtype, draw):
    x, weight = draw(7, 100, 20, dtype)
    expected = compute(x, weight, STARTS)
    x[4], x[45] = torch.nan, torch.inf
    out = compute(x, weight, STARTS)
    fine = [i for i in range(2, 57) if i not in (4, 45)]
    assert torch.equal(out[fine], expected[fine])
    assert bool(out[4].isnan().all())


def test_starts_that_are_wrong_reach_no_memory_outside(dtype, surround, assert_surrounded, device):
    x, out = surround(torch.ones(5, 8, dtype=dtype)), surround(torch.zeros(5, 6, dtype=dtype))
    weight = torch.ones(3, 6, 8, dtype=dtype, device=device)
    for starts in ([-40, 3, 4, 60], [4, 2, 90, 5]):
        launch_grouped_linear(x, weight, torch.tensor(starts, device=device), out, SMALL)
        assert_surrounded(out)


def test_the_chosen_configuration_gives_the_same_bits_for_few_and_many_rows(
    dtype, capability, draw
):
    config = choose_linear(dtype.itemsize, capability)
    x, weight = draw(2, 150, 140, dtype)
    whole = compute(x, weight, [0, 1, ROWS], config)
    assert torch.equal(compute(x[:3], weight, [0, 1, 3], config), whole[:3])
