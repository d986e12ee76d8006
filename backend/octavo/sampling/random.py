"""Seeds of the answers of one request. What is drawn with them: octavo_kernels.sample.

A number is drawn by counter, from (seed, position): it does not depend on neighbours, chunking or
preemption.
Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def fork_seeds(
    seeds: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the seed of each answer of a request: `seed + index * 0x9E3779B97F4A7C15`.

    These are the states SplitMix64 passes through from `seed` on, which are mixed before use. The
    first answer keeps the request's seed, and no two of one request are the same.

    Args:
        seeds: [rows] int64, those of the requests.
        indices: [rows] int64, which of its request's answers each row is.

    Returns:
        [rows] int64, wrapped around.
    """
    with np.errstate(over="ignore"):
        states = seeds.astype(np.uint64) + indices.astype(np.uint64) * _GOLDEN
    return states.astype(np.int64)
