"""What the sampler is told of each row, and with which seeds the answers of a request draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.random import fork_seeds
from octavo.sequence import Sequence
from octavo_kernels.sample import uniform_reference


def test_a_batch_with_random_rows_lists_all_rows_with_their_positions(make_sequence):
    sequences: list[Sequence] = [
        make_sequence("a", 4, temperature=0),
        make_sequence("b", 6, temperature=0.5, top_k=-1, seed=-9),
        make_sequence("c", 8, top_k=7, top_p=0.5, min_p=0.25, seed=2**63 - 1),
    ]
    sequences[2].append_token(1)
    random = build_sampling_batch(sequences, lambda _: frozenset()).random
    assert random.temperature.tolist() == [0.0, 0.5, 1.0]
    assert random.top_k.tolist() == [0, 0, 7]
    assert random.top_p.tolist() == [1.0, 1.0, 0.5]
    assert random.min_p.tolist() == [0.0, 0.0, 0.25]
    assert random.seeds.tolist()[1:] == [-9, 2**63 - 1]
    assert random.positions.tolist() == [4, 6, 9]


def test_a_batch_of_greedy_rows_has_no_parameters(make_sequence):
    sequences = [make_sequence("a", 4, temperature=0), make_sequence("b", 6, temperature=0)]
    assert build_sampling_batch(sequences, lambda _: frozenset()).random is None


def test_forks_draw_with_seeds_of_their_own(make_sequence):
    first = make_sequence("a", 4, seed=5, n=3)
    random = build_sampling_batch(
        [first, first.fork(1), first.fork(2), make_sequence("b", 4, seed=5)], lambda _: frozenset()
    ).random
    assert random.seeds.tolist() == [5, -7046029254386353126, 4354685564936845359, 5]


def to_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
def test_the_seeds_of_forks_are_the_states_of_split_mix_64(seed):
    indices = list(range(128))
    seeds = fork_seeds(np.array([seed] * 128), np.array(indices)).tolist()
    assert seeds == [to_int64(seed + index * 0x9E3779B97F4A7C15) for index in indices]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128


def test_forks_of_one_request_draw_independently():
    positions = torch.arange(4000)
    seeds = [fork_seeds(np.full(4000, 3), np.full(4000, index)) for index in range(8)]
    draws = [uniform_reference(torch.from_numpy(each), positions).numpy() for each in seeds]
    # Each correlation has a standard deviation of 0.016.
    correlations = np.corrcoef(draws) - np.eye(8)
    assert np.abs(correlations).max() < 0.07
