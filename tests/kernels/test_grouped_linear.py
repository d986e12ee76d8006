import pytest
import torch

from octavo_kernels import (
    grouped_linear,
    grouped_linear_reference,
    linear,
    quantize_weight,
)
from octavo_kernels.quantization import EIGHT_BITS

pytestmark = pytest.mark.kernels

# Groups without rows, of one row and of many; rows 0, 1 and 60 are of no group.
STARTS = [2, 2, 3, 50, 50, 60]
ROWS = 61


def draw(dtype, in_features=33, out_features=20):
    x, weight = torch.randn(ROWS, in_features), torch.randn(5, out_features, in_features)
    return x.to(dtype), weight.to(dtype), torch.tensor(STARTS)


def test_rows_have_the_bits_of_a_product_with_their_groups_weight_alone(dtype):
    x, weight, starts = draw(dtype)
    actual = grouped_linear(x, weight, starts)
    for index, each in enumerate(weight):
        rows = slice(STARTS[index], STARTS[index + 1])
        assert torch.equal(actual[rows], linear(x[rows], each))


def test_it_agrees_with_the_reference(dtype, assert_near):
    x, weight, starts = draw(dtype, in_features=7)
    expected = grouped_linear_reference(x, weight, starts)
    assert bool((expected[[0, 1, 60]] == 0).all())
    assert_near(grouped_linear(x, weight, starts)[2:60], expected[2:60])


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_weights_of_8_bits_have_the_scales_of_their_own_group(kind, dtype, assert_near):
    x, weight, starts = draw(dtype)
    quantized = [quantize_weight(each * 4**index, kind) for index, each in enumerate(weight)]
    elements, scales = (torch.stack(tensors) for tensors in zip(*quantized, strict=True))
    actual = grouped_linear(x, elements, starts, scales=scales)
    expected = grouped_linear_reference(x, elements, starts, scales)
    assert_near(actual[2:60], expected[2:60])
    for index, (own, own_scales) in enumerate(quantized):
        rows = slice(STARTS[index], STARTS[index + 1])
        assert torch.equal(actual[rows], linear(x[rows], own, scales=own_scales))


def test_only_rows_of_groups_are_written(dtype, surround, make_poisoned):
    x, weight, starts = draw(dtype)
    around = make_poisoned(ROWS, 30, dtype=dtype)
    out = around[:, 4:24]
    assert grouped_linear(surround(x), weight, starts, out=out) is out
    assert torch.equal(out[2:60], grouped_linear(x, weight, starts)[2:60])
    out[2:60] = 0
    assert int(around.isnan().sum()) == ROWS * 30 - 58 * 20


@pytest.mark.parametrize("starts", [[0, 2, 1], [-1, 2, 3], [0, 2, 4]])
def test_groups_that_are_not_within_the_rows_are_refused(starts):
    with pytest.raises(IndexError, match=r"^grouped_linear: group \d has rows from -?\d to \d but"):
        grouped_linear(torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor(starts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4)}, r"^grouped_linear: x has shape \[4\] but must be \[any, any\]$"),
        ({"weight": torch.ones(5, 4)}, r"weight has shape \[5, 4\] but must be \[any, any, 4\]$"),
        ({"weight": torch.ones(2, 5, 4).half()}, "weight is torch.float16 on cpu but must be"),
        ({"weight": torch.ones(5, 2, 4).mT}, r"weight has shape \[5, 4, 2\] but must be"),
        ({"scales": torch.ones(2)}, "weight is torch.float32 but must be torch.int8 or torch.fl"),
        (
            {"weight": torch.ones(2, 5, 4).char(), "scales": torch.ones(2)},
            r"scales has shape \[2\] but must be \[2, 5\]$",
        ),
        ({"starts": torch.zeros(2).long()}, r"starts has shape \[2\] but must be \[3\]$"),
        ({"starts": torch.zeros(3).int()}, "starts is torch.int32 but must be torch.int64$"),
        ({"out": torch.ones(3, 4)}, r"out has shape \[3, 4\] but must be \[3, 5\]$"),
    ],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = {
        "x": torch.ones(3, 4),
        "weight": torch.ones(2, 5, 4),
        "starts": torch.zeros(3).long(),
        "out": None,
    }
    with pytest.raises(ValueError, match=message):
        grouped_linear(**(arguments | change))
