"""Rows out of packed weights, by each version of the native code that this machine can run."""

import pytest
import torch

from octavo_kernels import pack_weight, packed_embedding
from octavo_kernels._native.library import native_library
from octavo_kernels._native.processor import usable_instruction_sets

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(native_library() is None, reason="this machine builds no native code"),
]

# Inputs and outputs: one; odd; of no whole lane or panel; of several panels.
SIZES = [(1, 1), (1, 33), (2, 31), (7, 13), (33, 50), (64, 64), (576, 65)]


@pytest.fixture(params=usable_instruction_sets(), ids=lambda x: x.name)
def instructions(request):
    return request.param


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_rows_are_to_the_bit_what_was_packed(inputs, outputs, dtype, instructions):
    weight = torch.randn(outputs, inputs).to(dtype)
    weight[0, 0], weight[-1, -1] = torch.nan, -0.0
    packed = pack_weight(weight, instructions=instructions)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for rows in (torch.arange(outputs), torch.randint(outputs, (200,))):
        assert torch.equal(packed_embedding(packed, rows).view(bits), weight[rows].view(bits))


def test_the_number_of_threads_changes_nothing(dtype, instructions):
    weight, rows = torch.randn(100, 35).to(dtype), torch.randint(100, (50,))
    packed = pack_weight(weight, instructions=instructions)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for count in (1, 3, 4, 50):
            assert torch.equal(packed_embedding(packed, rows[:count]), weight[rows[:count]])


def test_no_rows_give_no_rows(dtype):
    packed = pack_weight(torch.randn(4, 3).to(dtype))
    assert packed_embedding(packed, torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_torch_knows_the_operation_as_one_that_a_compiled_graph_can_hold(dtype):
    packed = pack_weight(torch.randn(5, 3).to(dtype))
    arguments = (packed.panels, torch.arange(4), torch.empty(4, 3, dtype=dtype), 5)
    operation = torch.ops.octavo.packed_embedding.default
    torch.library.opcheck(operation, (*arguments, packed.instructions))


@pytest.mark.parametrize("outside", [-1, 4, 2**40])
def test_a_row_outside_is_named(outside):
    packed = pack_weight(torch.randn(4, 3))
    with pytest.raises(IndexError, match=rf"row is {outside} but must be in \[0, 3\]"):
        packed_embedding(packed, torch.tensor([0, outside, 1]))


def test_wrong_arguments_are_refused():
    packed = pack_weight(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"rows is torch.int32 but must be torch.int64"):
        packed_embedding(packed, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rows has shape \[1, 2\] but must be \[any\]"):
        packed_embedding(packed, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows has strides \[2\]"):
        packed_embedding(packed, torch.zeros(4, dtype=torch.int64)[::2])
    with pytest.raises(ValueError, match="weight is packed as gated but must not be"):
        packed_embedding(pack_weight(torch.randn(4, 3), is_gated=True), torch.arange(2))
    with pytest.raises(ValueError, match="weight is packed as 8-bit integers but must not be"):
        packed_embedding(pack_weight(torch.randn(4, 3), to_int8=True), torch.arange(2))
