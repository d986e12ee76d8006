from dataclasses import fields

import pytest
import torch

from octavo_kernels import Penalties, apply_penalties_reference, apply_token_bitmask_reference
from octavo_kernels._launch import PiecesConfig
from octavo_kernels._sampling_launch import choose_bitmask, choose_penalties
from octavo_kernels._triton.apply_penalties import launch_apply_penalties
from octavo_kernels._triton.apply_token_bitmask import launch_apply_token_bitmask

SMALL = PiecesConfig(block_size=32, num_warps=1)


def make_penalties(token_ids: list[list[int]], rows: list[int]) -> Penalties:
    counts = torch.tensor([len(ids) for ids in token_ids])
    return Penalties(
        rows=torch.tensor(rows),
        row_starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        token_ids=torch.tensor([token_id for ids in token_ids for token_id in ids]),
        output_counts=torch.randint(3, (int(counts.sum()),), dtype=torch.int32),
        repetition=torch.rand(len(rows)) + 0.5,
        presence=torch.rand(len(rows)),
        frequency=torch.rand(len(rows)),
    )


@pytest.mark.parametrize("vocab", [1, 70, 1000])
def test_penalties_agree_with_reference(
    vocab, device, capability, surround, assert_surrounded, assert_near
):
    logits = torch.randn(4, vocab)
    seen = [torch.randperm(vocab)[:200].tolist(), [], [-1, 0, vocab], [0]]
    penalties = make_penalties(seen, [2, 0, 3, 9])
    moved = Penalties(*(getattr(penalties, x.name).to(device) for x in fields(penalties)))
    for config in (SMALL, choose_penalties(capability)):
        placed = surround(logits)
        launch_apply_penalties(placed, moved, config)
        assert_near(placed.cpu(), apply_penalties_reference(logits, penalties))
        assert_surrounded(placed)


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (31, 1), (500, 16), (500, 3), (70, 5)])
def test_bitmasks_agree_with_reference(
    vocab, words, device, capability, surround, assert_surrounded
):
    logits = torch.randn(4, vocab)
    bitmask = torch.randint(-(2**31), 2**31, (3, words)).int()
    rows = torch.tensor([3, 1, -1])
    for config in (SMALL, choose_bitmask(capability)):
        placed = surround(logits)
        launch_apply_token_bitmask(placed, bitmask.to(device), rows.to(device), config)
        assert torch.equal(placed.cpu(), apply_token_bitmask_reference(logits, bitmask, rows))
        assert_surrounded(placed)


def test_no_rows_launch_nothing(device, capability):
    logits, none = torch.randn(2, 5, device=device), torch.empty(0, dtype=torch.int64)
    bitmask = torch.empty((0, 1), dtype=torch.int32, device=device)
    launch_apply_token_bitmask(logits, bitmask, none.to(device), choose_bitmask(capability))
