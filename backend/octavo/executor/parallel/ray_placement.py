"""What is asked of a Ray cluster for the ranks of a model. Knows numbers, not Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What ranks need, or what there is for them."""

    num_cpus: float
    num_gpus: float

    def __mul__(self, count: int) -> Room:
        """Return what so many need."""
        return Room(self.num_cpus * count, self.num_gpus * count)

    def __floordiv__(self, each: Room) -> int:
        """Return how many have room here that need so much each."""
        count = self.num_cpus // each.num_cpus
        if each.num_gpus:
            count = min(count, self.num_gpus // each.num_gpus)
        return int(count)

    def __str__(self) -> str:
        return f"{_count(self.num_cpus, 'CPU')} and {_count(self.num_gpus, 'GPU')}"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as it told the cluster of itself."""

    id: str
    host: str
    room: Room


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles of CPUs and GPUs, each of which is one node's; the first is on rank zero's."""

    bundles: tuple[Room, ...]
    """What is in each."""
    bundle_of: tuple[int, ...]
    """The bundle of each rank."""

    def __str__(self) -> str:
        first, *others = self.bundles
        text = f"{first} on the node of rank 0"
        return f"{text}, {len(others)} times {others[0]}" if others else text


def place(
    nodes: Sequence[Node], own: Node, group_size: int, num_groups: int, need: Room
) -> Placement:
    """Return a bundle for each tensor group, so that it is on one node; or else for each rank.

    The latter only where the nodes have room for ranks one by one but not for whole groups, so that
    a node that is still to come does not divide a group.

    Args:
        nodes: all that there are.
        own: rank zero's.
        group_size: ranks of a tensor group; ranks are counted group by group.
        num_groups: how many there are.
        need: of one rank.
    """

    def have_room(size: Room, count: int) -> bool:
        return own.room // size > 0 and sum(node.room // size for node in nodes) >= count

    size, num_ranks = need * group_size, group_size * num_groups
    is_divided = not own.room // size or (
        not have_room(size, num_groups) and have_room(need, num_ranks)
    )
    if is_divided:
        return Placement((need,) * num_ranks, tuple(range(num_ranks)))
    groups = [rank // group_size for rank in range(num_ranks)]
    return Placement((size,) * num_groups, tuple(groups))


def describe(nodes: Sequence[Node], free: Room) -> str:
    """Say what a cluster has."""
    each = ", ".join(f"{node.host} with {node.room}" for node in nodes)
    return f"{each}; free are {free}"


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"
