"""A tensor group is on one node if it fits, and rank zero's is on rank zero's node."""

from __future__ import annotations

import pytest

from octavo.executor.parallel.ray_placement import Node, Placement, describe, place


def nodes_of(*sizes: float) -> list[Node]:
    return [Node(f"id-{index}", f"10.0.0.{index}", size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "cpus", "bundles"),
    [
        ((4, 4), 2, 2, 2, (4, 4)),  # a group on each node
        ((8, 0), 2, 2, 2, (4, 4)),  # both on one
        ((3, 3, 3), 2, 2, 2, (2, 2, 2, 2)),  # no node has room for a group
        ((4, 2, 2), 2, 2, 2, (2, 2, 2, 2)),  # one of two groups is on two nodes
        ((4,), 2, 2, 2, (4, 4)),  # a node is still to come
        ((2,), 2, 1, 2, (2, 2)),  # the same, but rank zero's has no room for its group
        ((4, 4), 1, 2, 4, (4, 4)),
        ((0, 8), 2, 1, 2, (2, 2)),  # will never be
    ],
)
def test_groups_stay_together_where_they_can(sizes, tp, pp, cpus, bundles):
    nodes = nodes_of(*sizes)
    placement = place(nodes, nodes[0], tp, pp, cpus)
    assert placement.bundles == bundles
    group_size = tp * pp // len(bundles)
    assert placement.bundle_of == tuple(rank // group_size for rank in range(tp * pp))


def test_what_is_asked_for_and_what_there_is_is_said_in_words():
    assert str(Placement((4, 4, 4), ())) == "4 CPUs on the node of rank 0 and 2 times 4 CPUs"
    assert str(Placement((1,), ())) == "1 CPU on the node of rank 0"
    assert describe(nodes_of(1, 2.5), 1.0) == (
        "10.0.0.0 with 1 CPU, 10.0.0.1 with 2.5 CPUs; free is 1 CPU"
    )
