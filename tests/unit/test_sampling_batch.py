"""Random numbers are a published function of (seed, position), and uniform."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.random import fork_seeds, uniform
from octavo.sequence import Sequence


def test_a_batch_lists_random_rows_with_their_positions(make_sequence):
    sequences: list[Sequence] = [
        make_sequence("a", 4, temperature=0),
        make_sequence("b", 6, temperature=0.5, top_k=-1, seed=-9),
        make_sequence("c", 8, top_k=7, top_p=0.5, min_p=0.25, seed=2**63 - 1),
    ]
    sequences[2].append_token(1)
    random = build_sampling_batch(sequences, lambda _: frozenset()).random
    assert random.rows.tolist() == [1, 2]
    assert random.temperature.tolist() == [0.5, 1.0]
    assert random.top_k.tolist() == [0, 7]
    assert random.top_p.tolist() == [1.0, 0.5]
    assert random.min_p.tolist() == [0.0, 0.25]
    assert random.seeds.tolist() == [-9, 2**63 - 1]
    assert random.positions.tolist() == [6, 9]


def test_forks_draw_with_seeds_of_their_own(make_sequence):
    first = make_sequence("a", 4, seed=5, n=3)
    random = build_sampling_batch(
        [first, first.fork(1), first.fork(2), make_sequence("b", 4, seed=5)], lambda _: frozenset()
    ).random
    assert random.seeds.tolist() == [5, -7046029254386353126, 4354685564936845359, 5]


def split_mix_64(state: int) -> int:
    """Return the output of one SplitMix64 step, in plain integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**40])
def test_random_numbers_are_split_mix_64_of_seed_and_position(seed, position):
    state = split_mix_64(seed % 2**64) + position * 0x9E3779B97F4A7C15
    expected = (split_mix_64(state % 2**64) >> 40) / 2**24
    assert uniform(np.array([seed]), np.array([position])).tolist() == [expected]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_random_numbers_are_uniform_along_seeds_and_along_positions(along):
    counter, fixed = np.arange(64_000), np.full(64_000, 17)
    pair = (counter, fixed) if along == "seeds" else (fixed, counter)
    numbers = uniform(*pair)
    assert numbers.dtype == np.float32
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert 20 < ((counts - 1000) ** 2 / 1000).sum() < 110
    lag = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(lag) < 0.02


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
    positions = np.arange(4000)
    draws = [
        uniform(fork_seeds(np.full(4000, 3), np.full(4000, index)), positions) for index in range(8)
    ]
    # Each correlation has a standard deviation of 0.016.
    correlations = np.corrcoef(draws) - np.eye(8)
    assert np.abs(correlations).max() < 0.07
