"""Grouped products with packed weights, by each version of the native code that can run here."""

import pytest
import torch

from octavo_kernels import (
    make_packed_groups,
    pack_group,
    pack_weight,
    packed_grouped_linear,
    packed_grouped_silu,
    packed_linear,
    silu_and_mul,
)
from octavo_kernels._native import library
from octavo_kernels._native.library import load_library, native_library
from octavo_kernels._native.processor import usable_instruction_sets

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(native_library() is None, reason="this machine builds no native code"),
]

# Without rows: the first group, two in the middle, the last. One of a single row, one of more than
# a block. Rows 0 to 2, and the last two, are of no group.
STARTS = [3, 3, 4, 4, 4, 210, 230, 230]
ROWS = 232


@pytest.fixture(params=usable_instruction_sets(), ids=lambda x: x.name)
def instructions(request):
    return request.param


@pytest.fixture
def make(instructions):
    """Make random weights [7, out, in], and the same packed."""

    def build(out_features, in_features, dtype, *, is_gated=False, to_int8=False):
        weight = torch.randn(len(STARTS) - 1, out_features, in_features).to(dtype)
        packed = make_packed_groups(
            tuple(weight.shape),
            dtype,
            is_gated=is_gated,
            to_int8=to_int8,
            instructions=instructions,
        )
        for index, each in enumerate(weight):
            pack_group(packed, index, each)
        return weight, packed

    return build


@pytest.mark.parametrize("to_int8", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 7), (16, 130), (130, 64)])
def test_rows_have_the_bits_of_a_product_with_their_groups_weight_alone(
    out_features, in_features, to_int8, dtype, instructions, make
):
    weight, packed = make(out_features, in_features, dtype, to_int8=to_int8)
    x = torch.randn(ROWS, in_features).to(dtype)
    actual = packed_grouped_linear(x, packed, torch.tensor(STARTS))
    for index, each in enumerate(weight):
        rows = slice(STARTS[index], STARTS[index + 1])
        alone = pack_weight(each, to_int8=to_int8, instructions=instructions)
        assert torch.equal(actual[rows], packed_linear(x[rows], alone)), index


def test_gated_weights_give_the_bits_of_silu_of_the_product(dtype, make, instructions, monkeypatch):
    monkeypatch.setattr(library, "native_library", lambda: load_library(instructions))
    _, packed = make(66, 35, dtype, is_gated=True)
    x, starts = torch.randn(ROWS, 35).to(dtype), torch.tensor(STARTS)
    gate_up = packed_grouped_linear(x, packed, starts)
    rows = slice(STARTS[0], STARTS[-1])
    actual = packed_grouped_silu(x, packed, starts)
    assert torch.equal(actual[rows], silu_and_mul(gate_up)[rows])


def test_neither_groups_nor_threads_nor_neighbours_change_a_bit(dtype, make):
    _, packed = make(70, 130, dtype)
    x = torch.randn(ROWS, 130).to(dtype)
    expected = packed_grouped_linear(x, packed, torch.tensor(STARTS))
    alone = torch.tensor([0, *[0] * 4, 1, 1, 1])
    for row in (4, 5, 100, 209):
        assert torch.equal(
            packed_grouped_linear(x[row : row + 1], packed, alone), expected[row : row + 1]
        )
    rows = slice(STARTS[0], STARTS[-1])
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        again = packed_grouped_linear(x, packed, torch.tensor(STARTS))
        assert torch.equal(again[rows], expected[rows])


def test_nothing_is_read_or_written_outside_the_groups(dtype, make, surround, make_poisoned):
    _, packed = make(45, 35, dtype)
    x, starts = torch.randn(ROWS, 35).to(dtype), torch.tensor(STARTS)
    expected = packed_grouped_linear(x, packed, starts)[3:230]
    x[:3], x[230:] = torch.nan, torch.nan
    around = make_poisoned(ROWS, 60, dtype=dtype)
    out = around[:, 7:52]
    assert packed_grouped_linear(surround(x), packed, starts, out=out) is out
    assert torch.equal(out[3:230], expected)
    out[3:230] = 0
    assert int(around.isnan().sum()) == ROWS * 60 - 227 * 45


def test_a_weight_takes_the_place_of_another(dtype, instructions, make):
    weight, packed = make(40, 33, dtype)
    x, starts = torch.randn(ROWS, 33).to(dtype), torch.tensor(STARTS)
    before = packed_grouped_linear(x, packed, starts)
    pack_group(packed, 4, weight[0])
    after = packed_grouped_linear(x, packed, starts)
    assert torch.equal(
        after[4:210], packed_linear(x[4:210], pack_weight(weight[0], instructions=instructions))
    )
    assert torch.equal(after[210:230], before[210:230])


def test_no_rows_are_computed_where_there_are_none(dtype, make, make_poisoned):
    _, packed = make(8, 4, dtype)
    out = make_poisoned(3, 8, dtype=dtype)
    packed_grouped_linear(torch.ones(3, 4, dtype=dtype), packed, torch.full((8,), 2), out=out)
    assert bool(out.isnan().all())
    empty = torch.empty(0, 4, dtype=dtype)
    assert packed_grouped_linear(empty, packed, torch.zeros(8).long()).shape == (0, 8)


def test_what_native_code_does_not_serve_is_not_packed():
    assert make_packed_groups((2, 3, 4), torch.float64) is None


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2, 1], r"^packed_grouped_linear: group 1 has rows from 2 to 1 but starts must ascend"),
        ([-1, 2, 3], r"group 0 has rows from -1 to 2 but starts must ascend within \[0, 3\]$"),
        ([0, 2, 4], "group 1 has rows from 2 to 4 but starts"),
    ],
)
def test_groups_that_are_not_within_the_rows_are_refused(starts, message, make_poisoned):
    packed = make_packed_groups((2, 5, 4), torch.float32)
    out = make_poisoned(3, 5, dtype=torch.float32)
    with pytest.raises(IndexError, match=message):
        packed_grouped_linear(torch.ones(3, 4), packed, torch.tensor(starts), out=out)
    assert bool(out.isnan().all())


def test_wrong_arguments_are_refused():
    packed = make_packed_groups((2, 6, 4), torch.float32)
    x, starts = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="weights have 5 outputs but gated ones must have an even"):
        make_packed_groups((2, 5, 4), torch.float32, is_gated=True)
    with pytest.raises(ValueError, match=r"pack_group: weight has shape \[5, 4\] but must be"):
        pack_group(packed, 0, torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"pack_group: weight is torch\.float16 but must be"):
        pack_group(packed, 0, torch.ones(6, 4).half())
    with pytest.raises(IndexError):
        pack_group(packed, 2, torch.ones(6, 4))
    with pytest.raises(ValueError, match=r"linear: x has shape \[3, 5\] but must be \[any, 4\]"):
        packed_grouped_linear(torch.ones(3, 5), packed, starts)
    with pytest.raises(ValueError, match=r"starts has shape \[2\] but must be \[3\]"):
        packed_grouped_linear(x, packed, starts[:2])
    with pytest.raises(ValueError, match=r"starts is torch\.int32 but must be torch\.int64"):
        packed_grouped_linear(x, packed, starts.int())
    with pytest.raises(ValueError, match=r"out has shape \[3, 4\] but must be \[3, 6\]"):
        packed_grouped_linear(x, packed, starts, out=torch.empty(3, 4))
    with pytest.raises(ValueError, match="packed_grouped_silu: weights must be packed as gated"):
        packed_grouped_silu(x, packed, starts)
