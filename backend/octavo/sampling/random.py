"""Random numbers by counter: a function of (seed, position) and nothing else.

So a sequence's draws do not depend on its neighbours, on chunking or on preemption.
Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) for each (seed, position); 24 random bits, exact in float32.

    Args:
        seeds: [rows] int64, any value.
        positions: [rows] int64, absolute position of the token to draw.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + positions.astype(np.uint64) * _GOLDEN
        bits = _mix(state) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def fork_seeds(
    seeds: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the seed of each answer of a request: `seed + index * 0x9E3779B97F4A7C15`.

    These are the states SplitMix64 passes through from `seed` on, which `uniform` mixes. The first
    answer keeps the request's seed, and no two of one request are the same.

    Args:
        seeds: [rows] int64, those of the requests.
        indices: [rows] int64, which of its request's answers each row is.

    Returns:
        [rows] int64, wrapped around.
    """
    with np.errstate(over="ignore"):
        states = seeds.astype(np.uint64) + indices.astype(np.uint64) * _GOLDEN
    return states.astype(np.int64)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
