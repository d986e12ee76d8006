"""Inputs reach the device whole, in time and always at the same places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.executor.batch import BatchInputs
from octavo.executor.device_inputs import HostInputs, StepSizes
from octavo.model.adapted_rows import AdaptedRows
from octavo_kernels import AttentionMetadata

SIZES = StepSizes(max_num_seqs=5, max_num_tokens=40, max_model_len=60, block_size=8)


def make_inputs(
    num_tokens: int, num_seqs: int, num_rows: int, *, width: int = 3, pending=(), seed: int = 0
) -> BatchInputs:
    """Make inputs of these sizes, all their numbers different."""
    numbers = iter(range(1000 * seed + 1, 1000 * seed + 1000))

    def take(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([next(numbers) for _ in range(count)], dtype=dtype).view(shape)

    return BatchInputs(
        token_ids=take(num_tokens),
        positions=take(num_tokens),
        logits_rows=take(num_rows),
        pending=torch.tensor(pending, dtype=torch.int64).view(-1, 2),
        attention=AttentionMetadata(
            query_start_loc=take(num_seqs + 1, dtype=torch.int32),
            seq_lens=take(num_seqs, dtype=torch.int32),
            block_tables=take(num_seqs, width, dtype=torch.int32),
            slot_mapping=take(num_tokens),
            max_query_len=7,
            max_seq_len=19,
        ),
    )


def tensors(inputs: BatchInputs) -> dict[str, torch.Tensor]:
    own = ("token_ids", "positions", "logits_rows", "pending")
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping")
    found = {name: getattr(inputs, name) for name in own}
    return found | {name: getattr(inputs.attention, name) for name in names}


def assert_same(inputs: BatchInputs, expected: BatchInputs) -> None:
    for name, tensor in tensors(expected).items():
        assert tensors(inputs)[name].dtype == tensor.dtype
        assert torch.equal(tensors(inputs)[name], tensor), name
    assert inputs.attention.max_query_len == expected.attention.max_query_len
    assert inputs.attention.max_seq_len == expected.attention.max_seq_len


@pytest.fixture
def staged(staged_inputs):
    return staged_inputs(SIZES)


def test_where_memory_is_the_hosts_inputs_stay_where_they_are():
    inputs = make_inputs(4, 2, 2)
    assert HostInputs().put(inputs, None) is inputs


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 1, 0), (3, 2, 1), (17, 4, 5), (33, 5, 3), (40, 5, 5)]
)
def test_inputs_arrive_as_they_are(staged, sizes):
    assert_same(staged.put(make_inputs(*sizes), None), make_inputs(*sizes))


def test_adapted_rows_arrive_too_and_move_nothing_else(staged_inputs):
    staged = staged_inputs(replace(SIZES, num_adapter_slots=3))
    plain = staged.put(make_inputs(40, 5, 5), None)
    adapted = AdaptedRows(torch.arange(40).flip(0), torch.tensor([0, 7, 7, 40]))
    placed = staged.put(replace(make_inputs(40, 5, 5), adapted=adapted), None)
    assert_same(placed, make_inputs(40, 5, 5))
    assert torch.equal(placed.adapted.rows, adapted.rows)
    assert torch.equal(placed.adapted.starts, adapted.starts)
    for name, tensor in tensors(plain).items():
        assert tensor.data_ptr() == tensors(placed)[name].data_ptr(), name
    assert plain.adapted is None


def test_the_largest_step_fits(staged):
    pending = [(index, index) for index in range(5)]
    largest = make_inputs(40, 5, 5, width=SIZES.max_blocks, pending=pending)
    placed = staged.put(largest, torch.arange(100, 105))
    assert torch.equal(placed.attention.block_tables, largest.attention.block_tables)


def test_every_field_begins_where_no_kernel_is_compiled_anew(staged):
    addresses = [
        tensor.data_ptr()
        for num_tokens in (1, 7, 40)
        for tensor in tensors(staged.put(make_inputs(num_tokens, 3, 2), None)).values()
        if tensor.numel()
    ]
    base = min(addresses)
    assert {(address - base) % 128 for address in addresses} == {0}


def test_steps_of_equal_numbers_have_equal_addresses_but_for_pending_and_block_tables(staged):
    def addresses(**others) -> dict[str, int]:
        placed = tensors(staged.put(make_inputs(6, 4, 3, **others), torch.zeros(9).long()))
        return {name: tensor.data_ptr() for name, tensor in placed.items()}

    first = addresses()
    second = addresses(width=7, pending=[(2, 1), (3, 8), (5, 0)], seed=1)
    varying = {name for name in first if first[name] != second[name]}
    assert varying <= {"pending", "block_tables"}


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_pending_ids_are_those_that_the_step_before_drew(kind, staged):
    put = HostInputs().put if kind == "host" else staged.put
    drawn = torch.tensor([50, 51, 52, 53])
    placed = put(make_inputs(5, 5, 5, pending=[(4, 0), (1, 3)]), drawn)
    assert placed.token_ids.tolist() == [1, 53, 3, 4, 50]
    assert placed.positions.tolist() == [6, 7, 8, 9, 10]


def test_a_row_from_which_nothing_was_drawn_gives_a_token_that_the_model_has(staged):
    placed = staged.put(make_inputs(2, 2, 2, pending=[(1, 0)]), torch.tensor([-1]))
    assert placed.token_ids[1] == 0


def test_pending_ids_are_filled_in_on_the_device_alone(staged):
    inputs = make_inputs(2, 2, 2, pending=[(0, 0)])
    staged.put(inputs, torch.tensor([77]))
    assert inputs.token_ids.tolist() == [1, 2]


def test_pending_ids_of_no_step_are_a_mistake(staged):
    with pytest.raises(AssertionError, match="1 token ids are pending but no step drew"):
        staged.put(make_inputs(2, 2, 2, pending=[(0, 0)]), None)


def test_steps_in_flight_do_not_overwrite_each_other(staged_inputs, lazy_stream):
    staged = staged_inputs(SIZES, lazy_stream)
    steps = [make_inputs(6, 4, 3, seed=seed) for seed in range(6)]
    placed = staged.put(steps[0], None)
    arrived = []
    lazy_stream.after_copy = lambda: arrived.append(
        {name: tensor.clone() for name, tensor in tensors(placed).items()}
    )
    for step in steps[1:]:
        staged.put(step, None)
    while lazy_stream.queue:
        lazy_stream.queue.popleft()()
    assert len(arrived) == len(steps)
    for fields, step in zip(arrived, steps, strict=True):
        for name, tensor in tensors(step).items():
            assert torch.equal(fields[name], tensor), name


def test_the_host_waits_only_for_the_copy_of_two_steps_before(staged_inputs, lazy_stream):
    staged = staged_inputs(SIZES, lazy_stream)
    num_waits = []
    for _ in range(4):
        staged.put(make_inputs(6, 4, 3), None)
        num_waits.append(lazy_stream.num_waits)
    assert num_waits == [0, 0, 1, 2]
