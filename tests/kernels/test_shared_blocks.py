"""Sequences whose tables name the same blocks: each row keeps the bits that it has alone."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape

pytestmark = pytest.mark.kernels


@dataclass(frozen=True)
class Sequence:
    blocks: list[int]
    length: int
    rows: int


def draw_sequences(
    draw: random.Random, block_size: int, window: int | None
) -> tuple[list[Sequence], int]:
    """Draw sequences that begin with blocks of a few prefixes, and say how many blocks there are.

    Some end inside a prefix; blocks out of the window of all rows may be gone from the table.
    """
    blocks = iter(range(10_000))
    longest = math.ceil(300 / block_size)
    prefixes = [[next(blocks) for _ in range(longest)] for _ in range(3)]
    sequences = []
    for _ in range(draw.randint(8, 14)):
        shared = draw.randint(0, longest)
        length = max(1, shared * block_size + draw.randint(-block_size, 90))
        rows = min(length, draw.choice([1, 1, 1, 2, 30]))
        count = math.ceil(length / block_size)
        own = [next(blocks) for _ in range(count - min(shared, count))]
        table = [*draw.choice(prefixes)[: count - len(own)], *own]
        if window and draw.random() < 0.5:
            unseen = max(0, length - rows - window + 1) // block_size
            table[:unseen] = [-1] * unseen
        sequences.append(Sequence(table, length, rows))
    return sequences, next(blocks)


def describe(sequences: list[Sequence]) -> AttentionMetadata:
    rows, lens = [x.rows for x in sequences], [x.length for x in sequences]
    tables = torch.full((len(sequences), max(len(x.blocks) for x in sequences)), -123)
    for table, sequence in zip(tables, sequences, strict=True):
        table[: len(sequence.blocks)] = torch.tensor(sequence.blocks)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *rows]).cumsum(0).int(),
        seq_lens=torch.tensor(lens).int(),
        block_tables=tables.int(),
        slot_mapping=torch.full((sum(rows),), -1),
        max_query_len=max(rows),
        max_seq_len=max(lens),
    )


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_read_the_same_blocks_have_the_bits_they_have_alone(
    make_any_backend, dtype, seed
):
    draw = random.Random(seed)
    kv_heads, group = draw.choice([(1, 1), (1, 4), (2, 2), (3, 1), (3, 3)])
    head_dim, block_size = draw.choice([16, 64, 80]), draw.choice([8, 16, 32, 128])
    window = draw.choice([None, None, 20, 150])
    sequences, num_blocks = draw_sequences(draw, block_size, window)
    backend = make_any_backend(KVCacheShape(1, kv_heads, head_dim, block_size, dtype))
    cache = backend.allocate(num_blocks)
    cache.storage.normal_()
    q = torch.randn(sum(x.rows for x in sequences), kv_heads * group, head_dim).to(dtype)
    options = {
        "scale": head_dim**-0.5,
        "window": window,
        "soft_cap": draw.choice([None, 3.0]),
        "sinks": draw.choice([None, torch.randn(kv_heads * group)]),
    }

    torch.set_num_threads(draw.choice([1, 2]))
    together = backend.paged_attention(q, cache, 0, describe(sequences), **options)

    rows = [x.rows for x in sequences]
    for sequence, own, out in zip(sequences, q.split(rows), together.split(rows), strict=True):
        alone = backend.paged_attention(own, cache, 0, describe([sequence]), **options)
        assert torch.equal(out, alone)
