"""The engine option that says on which CUDA devices the ranks compute.

Knows nothing of what devices there are, or of other options.
"""

from __future__ import annotations

import re

from octavo.errors import ConfigError, shown


def read_device_numbers(text: str, num_ranks: int) -> tuple[int, ...]:
    """Read `0,2`: the number of each rank's device, in order of rank.

    Raises:
        ConfigError: it is no list of numbers, names a device twice, or is not as long as there are
            ranks.
    """
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text, re.ASCII) is None:
        _refuse(text, "numbers of CUDA devices, joined by commas")
    numbers = tuple(map(int, text.split(",")))
    if len(set(numbers)) < len(numbers):
        _refuse(text, "different numbers, as ranks cannot share a device")
    if len(numbers) != num_ranks:
        ranks = "one number, as there is one rank"
        if num_ranks > 1:
            ranks = (
                f"{num_ranks} numbers, one for each rank of tensor_parallel_size times "
                "pipeline_parallel_size"
            )
        _refuse(text, ranks)
    return numbers


def _refuse(text: str, allowed: str) -> None:
    raise ConfigError(f"option devices is {shown(text)} but must be {allowed}")
