"""What is asked of a Ray cluster for the ranks of a model. Knows numbers, not Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as it told the cluster of itself."""

    id: str
    host: str
    num_cpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles of CPUs, each of which is one node's; the first is on rank zero's."""

    bundles: tuple[int, ...]
    """CPUs of each."""
    bundle_of: tuple[int, ...]
    """The bundle of each rank."""

    def __str__(self) -> str:
        first, *others = self.bundles
        text = f"{_cpus(first)} on the node of rank 0"
        return f"{text} and {len(others)} times {_cpus(others[0])}" if others else text


def place(
    nodes: Sequence[Node], own: Node, group_size: int, num_groups: int, cpus: int
) -> Placement:
    """Return a bundle for each tensor group, so that it is on one node; or else for each rank.

    The latter only where the nodes have room for ranks one by one but not for whole groups, so that
    a node that is still to come does not divide a group.

    Args:
        nodes: all that there are.
        own: rank zero's.
        group_size: ranks of a tensor group; ranks are counted group by group.
        num_groups: how many there are.
        cpus: of one rank.
    """

    def have_room(size: int, count: int) -> bool:
        fitting = sum(int(node.num_cpus // size) for node in nodes)
        return own.num_cpus >= size and fitting >= count

    size, num_ranks = group_size * cpus, group_size * num_groups
    is_divided = own.num_cpus < size or (
        not have_room(size, num_groups) and have_room(cpus, num_ranks)
    )
    if is_divided:
        return Placement((cpus,) * num_ranks, tuple(range(num_ranks)))
    groups = [rank // group_size for rank in range(num_ranks)]
    return Placement((size,) * num_groups, tuple(groups))


def describe(nodes: Sequence[Node], num_free: float) -> str:
    """Say what a cluster has."""
    each = ", ".join(f"{node.host} with {_cpus(node.num_cpus)}" for node in nodes)
    return f"{each}; free {'is' if num_free == 1 else 'are'} {_cpus(num_free)}"


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'' if number == 1 else 's'}"
