"""Blocks are gathered and scattered to the bit, and nothing else is touched."""

import pytest
import torch

from octavo_kernels import (
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

pytestmark = pytest.mark.kernels


def ids(*given: int) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int64)


@pytest.fixture
def storage(dtype) -> torch.Tensor:
    """Blocks of any bits, those of NaN with a payload among them."""
    words = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    return torch.randint(-(2**15), 2**15, (7, 3, 11), dtype=words).view(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("given", [(), (2,), (6, 0, 3), (1, 1, 1), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_named_blocks_lie_side_by_side_in_the_order_named(storage, given):
    gathered = gather_blocks(storage, ids(*given))
    assert_same_bits(gathered, storage[list(given)])
    assert_same_bits(gathered, gather_blocks_reference(storage, ids(*given)))


def test_a_given_out_receives_them_between_memory_that_stays_poisoned(storage, make_poisoned):
    around = make_poisoned(4, 3, 11, dtype=storage.dtype)
    out = around[1:3]
    assert gather_blocks(storage, ids(5, 2), out=out) is out
    assert_same_bits(out, storage[[5, 2]])
    assert bool(around[[0, 3]].isnan().all())


@pytest.mark.parametrize("given", [(), (2,), (6, 0, 3)], ids=str)
def test_scattered_blocks_go_to_their_places_and_nowhere_else(storage, given):
    blocks = torch.randn(len(given), 3, 11).to(storage.dtype)
    expected, same = storage.clone(), storage.clone()
    scatter_blocks_reference(blocks, expected, ids(*given))
    scatter_blocks(blocks, same, ids(*given))
    assert_same_bits(same, expected)
    for block, place in zip(blocks, given, strict=True):
        assert_same_bits(same[place], block)


def test_what_is_gathered_and_scattered_back_is_as_it_was(storage):
    expected, order = storage.clone(), torch.randperm(7)
    gathered = gather_blocks(storage, order)
    storage.zero_()
    scatter_blocks(gathered, storage, order)
    assert_same_bits(storage, expected)


@pytest.mark.parametrize("outside", [-1, 7, 2**40])
def test_an_id_outside_the_storage_is_named_and_nothing_is_written(outside):
    storage = torch.zeros(7, 4)
    message = rf"blocks: block_ids\[1\] is {outside} but the storage has 7 blocks"
    with pytest.raises(IndexError, match=message):
        gather_blocks(storage, ids(0, outside))
    with pytest.raises(IndexError, match=message):
        scatter_blocks(torch.ones(2, 4), storage, ids(0, outside))
    assert not storage.any()


def test_a_block_can_be_scattered_to_once():
    storage = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="block_ids names a block twice but must name each once"):
        scatter_blocks(torch.ones(2, 4), storage, ids(1, 1))
    assert not storage.any()


@pytest.mark.parametrize(
    ("storage", "block_ids", "message"),
    [
        (torch.zeros(4), ids(0), r"storage has 1 dimension\(s\) but must have 2 or more"),
        (torch.zeros(4, 6)[:, ::2], ids(0), "storage has strides"),
        (torch.zeros(4, 2).int(), ids(0), "storage is torch.int32 but must be"),
        (torch.zeros(4, 2), ids(0)[None], r"block_ids has shape \[1, 1\] but must be \[any\]"),
        (torch.zeros(4, 2), ids(0).int(), "block_ids is torch.int32 but must be torch.int64"),
        (
            torch.zeros(4, 2),
            torch.zeros(1, dtype=torch.int64, device="meta"),
            "block_ids are on meta but must be on the CPU or on cpu",
        ),
    ],
)
def test_what_does_not_fit_is_refused(storage, block_ids, message):
    with pytest.raises(ValueError, match=message):
        gather_blocks(storage, block_ids)
    with pytest.raises(ValueError, match=message):
        scatter_blocks(torch.zeros(1, 2), storage, block_ids)


def test_the_other_side_must_be_blocks_of_the_storage():
    storage, one = torch.zeros(4, 2), ids(0)
    with pytest.raises(ValueError, match=r"out has shape \[2, 2\] but must be \[1, 2\]"):
        gather_blocks(storage, one, out=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"blocks is torch\.float16 on cpu but must be"):
        scatter_blocks(torch.zeros(1, 2).half(), storage, one)
