"""What adapters add to a product, by each version of the native code that this machine can run."""

import pytest
import torch

from octavo_kernels import (
    LowRankTable,
    low_rank_add_,
    low_rank_add_reference,
    make_packed_groups,
    pack_group,
    pack_weight,
    packed_grouped_linear,
)
from octavo_kernels._native.library import native_library
from octavo_kernels._native.processor import usable_instruction_sets

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(native_library() is None, reason="this machine builds no native code"),
]

TOKENS = 40
# Of slots 0 to 4: one row, none, more than two tiles, three, two. The others have no adapter.
ROWS = torch.tensor([7, *range(12, 35), 0, 39, 8, 3, 4])
STARTS = torch.tensor([0, 1, 1, 24, 27, 29])
RANKS = [3, 5, 1, 17, 70]


@pytest.fixture(params=usable_instruction_sets(), ids=lambda x: x.name)
def instructions(request):
    return request.param


@pytest.fixture
def make(instructions):
    """Make a table of random adapters of `RANKS`, and their matrices."""

    def build(inputs, outputs, is_gated=False):
        weight = torch.zeros(outputs, inputs)
        packed = pack_weight(weight, is_gated=is_gated, instructions=instructions)
        table = LowRankTable(packed, len(RANKS))
        pairs = [(torch.randn(rank, inputs), torch.randn(outputs, rank)) for rank in RANKS]
        for slot, pair in enumerate(pairs):
            table.put(slot, table.pack(*pair))
        return table, pairs

    return build


@pytest.fixture
def multiply(instructions):
    """Multiply rows by a weight, in float32 and in the order of the inputs."""

    def run(x, weight):
        shape = (1, *weight.shape)
        groups = make_packed_groups(shape, torch.float32, instructions=instructions)
        pack_group(groups, 0, weight)
        return packed_grouped_linear(x.float().contiguous(), groups, torch.tensor([0, len(x)]))

    return run


def rows_of(slot):
    return ROWS[STARTS[slot] : STARTS[slot + 1]]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 2), (7, 30), (130, 66), (64, 192)])
def test_the_bits_are_those_of_two_products_with_the_rows_adapter_alone(
    inputs, outputs, is_gated, dtype, make, multiply, threads
):
    table, pairs = make(inputs, outputs, is_gated)
    x, product = torch.randn(TOKENS, inputs).to(dtype), torch.randn(TOKENS, outputs).to(dtype)
    expected = product.clone()
    for slot, (down, up) in enumerate(pairs):
        rows = rows_of(slot)
        if len(rows):
            added = multiply(multiply(x[rows], down), up)
            expected[rows] = (added + product[rows]).to(dtype)
    low_rank_add_(product, x, table, ROWS, STARTS)
    assert torch.equal(product, expected)


def test_what_is_added_is_near_the_reference(dtype, make, assert_near):
    table, pairs = make(30, 44)
    x, product = torch.randn(TOKENS, 30).to(dtype), torch.randn(TOKENS, 44).to(dtype)
    scaled = [(down / 30, up) for down, up in pairs]
    for slot, pair in enumerate(scaled):
        table.put(slot, table.pack(*pair))
    expected = low_rank_add_reference(product, x, scaled, ROWS, STARTS)
    low_rank_add_(product, x, table, ROWS, STARTS)
    assert_near(product, expected)


def test_ranks_that_add_nothing_to_some_outputs_change_no_bit_and_take_no_memory(make, multiply):
    """As those of layers that are joined, whose parts begin within a vector of outputs."""
    table, _ = make(50, 90)
    down, up = torch.randn(9, 50), torch.zeros(90, 9)
    up[:20, :4], up[20:37, 4:6], up[37:70, 6:] = torch.randn(20, 4), 2, -1
    packed = table.pack(down, up)
    assert len(packed.up) < len(table.pack(down, torch.randn(90, 9)).up) / 2
    table.put(2, packed)
    x, product = torch.randn(TOKENS, 50), torch.randn(TOKENS, 90)
    rows = rows_of(2)
    expected = multiply(multiply(x[rows], down), up) + product[rows]
    low_rank_add_(product, x, table, ROWS, STARTS)
    assert torch.equal(product[rows], expected)


def test_a_slot_may_be_emptied_and_given_another_adapter(dtype, make):
    table, pairs = make(20, 40)
    x, before = torch.randn(TOKENS, 20).to(dtype), torch.randn(TOKENS, 40).to(dtype)
    first, emptied, again = before.clone(), before.clone(), before.clone()
    low_rank_add_(first, x, table, ROWS, STARTS)
    table.put(2, None)
    low_rank_add_(emptied, x, table, ROWS, STARTS)
    table.put(2, table.pack(*pairs[2]))
    low_rank_add_(again, x, table, ROWS, STARTS)
    assert torch.equal(emptied[rows_of(2)], before[rows_of(2)])
    assert torch.equal(emptied[rows_of(3)], first[rows_of(3)])
    assert torch.equal(again, first)


def test_rows_may_lie_anywhere_and_nothing_is_read_or_written_beside_them(dtype, make, surround):
    table, _ = make(13, 21)
    x, product = torch.randn(TOKENS, 13).to(dtype), torch.randn(TOKENS, 21).to(dtype)
    apart = surround(product)
    low_rank_add_(product, x, table, ROWS, STARTS)
    low_rank_add_(apart, surround(x), table, ROWS, STARTS)
    assert torch.equal(apart, product)
    assert apart._base.isnan().sum() == apart._base.numel() - apart.numel()


@pytest.mark.parametrize(
    ("rows", "starts", "message"),
    [
        ([3, TOKENS], [0, 1, 1, 1, 1, 2], r"row 40 is outside the 40 of the step"),
        ([-1], [0, 1, 1, 1, 1, 1], r"row -1 is outside the 40 of the step"),
        ([3, 4], [0, 2, 1, 2, 2, 2], r"group 1 has rows from 2 to 1 but starts must ascend"),
        ([3, 4], [0, 1, 1, 1, 1, 3], r"group 4 has rows from 1 to 3 .* within \[0, 2\]"),
        ([3, 4], [-1, 1, 1, 1, 1, 2], r"group 0 has rows from -1 to 1"),
    ],
)
def test_rows_that_point_outside_are_refused_and_nothing_is_written(rows, starts, message, make):
    table, _ = make(10, 20)
    product = torch.randn(TOKENS, 20)
    before = product.clone()
    with pytest.raises(IndexError, match=message):
        low_rank_add_(
            product, torch.randn(TOKENS, 10), table, torch.tensor(rows), torch.tensor(starts)
        )
    assert torch.equal(product, before)


def test_a_row_of_two_adapters_touches_no_memory_of_others(make):
    """It is refused nowhere, and gets what is not defined; the others are as ever."""
    table, _ = make(10, 20)
    x, product = torch.randn(TOKENS, 10), torch.randn(TOKENS, 20)
    expected = product.clone()
    low_rank_add_(expected, x, table, torch.tensor([5, 6]), torch.tensor([0, 0, 0, 0, 1, 2]))
    rows, starts = torch.tensor([9, 5, 6, 9]), torch.tensor([0, 1, 1, 1, 2, 4])
    low_rank_add_(product, x, table, rows, starts)
    assert torch.equal(product[[5, 6]], expected[[5, 6]])


def test_tensors_of_other_sizes_are_refused(make):
    table, pairs = make(10, 20)
    down, up = pairs[0]
    x, product = torch.randn(TOKENS, 10), torch.randn(TOKENS, 20)
    with pytest.raises(ValueError, match=r"pack: down has shape \[3, 9\] but must be \[3, 10\]"):
        table.pack(down[:, :9].contiguous(), up)
    with pytest.raises(ValueError, match=r"pack: up has shape \[20, 2\] but must be \[20, 3\]"):
        table.pack(down, up[:, :2].contiguous())
    with pytest.raises(ValueError, match=r"adapter has shape \(7, 30\) but must have \(10, 20\)"):
        table.put(0, make(7, 30)[0].pack(torch.randn(3, 7), torch.randn(30, 3)))
    with pytest.raises(IndexError):
        table.put(5, None)
    with pytest.raises(ValueError, match=r"product has shape \[40, 19\] but must be \[40, 20\]"):
        low_rank_add_(product[:, :19], x, table, ROWS, STARTS)
    with pytest.raises(ValueError, match=r"starts has shape \[5\] but must be \[6\]"):
        low_rank_add_(product, x, table, ROWS, STARTS[:5])
    with pytest.raises(ValueError, match="rows is on meta but must be on cpu"):
        low_rank_add_(product, x, table, ROWS.to("meta"), STARTS)
