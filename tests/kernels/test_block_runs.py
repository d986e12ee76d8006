"""Many blocks move as few pieces, which changes no bit of what arrives."""

import random

import pytest
import torch

from octavo_kernels._block_runs import (
    Run,
    copy_runs,
    copy_staged,
    neighbouring_runs,
    staged_stretches,
)

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([(4, 9)], [(4, 9, 1)]),
        ([(4, 9), (5, 10), (6, 11)], [(4, 9, 3)]),
        ([(4, 9), (5, 11), (6, 12), (6, 13)], [(4, 9, 1), (5, 11, 2), (6, 13, 1)]),
        ([(5, 9), (4, 8)], [(5, 9, 1), (4, 8, 1)]),
    ],
    ids=str,
)
def test_pairs_whose_blocks_both_follow_each_other_are_one_run(pairs, runs):
    assert list(neighbouring_runs(pairs, one_memory=False)) == [Run(*run) for run in runs]


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([(0, 1), (1, 2), (2, 3)], [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
        ([(2, 0), (3, 1), (4, 2)], [(2, 0, 2), (4, 2, 1)]),
        ([(0, 3), (1, 4), (2, 5)], [(0, 3, 3)]),
        ([(2, 2), (3, 3)], [(2, 2, 1), (3, 3, 1)]),
    ],
    ids=str,
)
def test_within_one_memory_a_run_ends_before_it_reads_what_it_writes(pairs, runs):
    assert list(neighbouring_runs(pairs, one_memory=True)) == [Run(*run) for run in runs]


@pytest.mark.parametrize("host", [0, 1])
def test_a_stretch_follows_the_host_names_no_device_block_twice_and_has_a_limit(host):
    def pairs(*given: tuple[int, int]) -> list[tuple[int, int]]:
        """Return pairs given as host block, device block."""
        return [pair if host == 0 else pair[::-1] for pair in given]

    given = pairs((3, 9), (4, 2), (5, 9), (6, 1), (7, 4), (8, 5), (9, 6), (1, 0))
    stretches = list(staged_stretches(given, host, 3))
    assert [len(stretch) for stretch in stretches] == [2, 3, 2, 1]
    assert [pair for stretch in stretches for pair in stretch] == given
    assert list(staged_stretches([], host, 3)) == []


def moved_one_by_one(source, target, pairs) -> torch.Tensor:
    expected = target.clone()
    read = expected if source is target else source
    for block, place in pairs:
        expected[place] = read[block]
    return expected


def draw_pairs(draw: random.Random, sources: int, targets: int) -> list[tuple[int, int]]:
    """Return pairs of which many follow each other."""
    pairs = []
    for _ in range(20):
        source, target = draw.randrange(sources), draw.randrange(targets)
        count = draw.randint(1, 4)
        for i in range(min(count, sources - source, targets - target)):
            pairs.append((source + i, draw.randrange(targets) if count == 4 else target + i))
    return pairs


@pytest.mark.parametrize("seed", range(20))
def test_runs_arrive_as_pairs_copied_one_after_the_other(seed):
    draw = random.Random(seed)
    one, other = torch.randn(9, 5), torch.randn(13, 5)
    for source, target in ((one, one), (one, other), (other, one)):
        pairs = draw_pairs(draw, len(source), len(target))
        expected = moved_one_by_one(source, target, pairs)
        copy_runs(source, target, pairs)
        assert torch.equal(target, expected)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("out", [True, False])
def test_staged_blocks_arrive_as_pairs_copied_one_after_the_other(seed, out):
    draw = random.Random(seed)
    source, target = torch.randn(9, 5), torch.randn(13, 5)
    pairs = draw_pairs(draw, 9, 13)
    if draw.random() < 0.5:  # scattered on the device, side by side on the host
        places = range(draw.randrange(5), 13)
        pairs += [(draw.randrange(9), place) for place in places] if out else []
        pairs += [] if out else [(place, draw.randrange(13)) for place in places if place < 9]
    expected = moved_one_by_one(source, target, pairs)
    copy_staged(source, target, pairs, out=out)
    assert torch.equal(target, expected)
