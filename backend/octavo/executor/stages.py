"""When the steps of a pipeline must be finished; knows nothing of what they compute."""

from __future__ import annotations


def num_due(compute: list[bool], num_stages: int) -> int:
    """Return how many of the started steps must be finished before the next one is planned.

    Args:
        compute: for each, the oldest first, whether anybody is scheduled in it.
        num_stages: steps that can compute at once.
    """
    computing = [place for place, computes in enumerate(compute) if computes]
    num_full = max(0, len(computing) + 1 - num_stages)
    # Where nobody could be scheduled, the oldest step tells who can.
    later = computing[num_full if compute[-1] else 1 :]
    return later[0] if later else len(compute)
