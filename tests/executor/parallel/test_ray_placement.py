"""A tensor group is on one node if it fits, and rank zero's is on rank zero's node."""

from __future__ import annotations

import pytest

from octavo.executor.parallel.ray_placement import Node, Placement, Room, describe, place


def nodes_of(*rooms: tuple[float, float]) -> list[Node]:
    return [Node(f"id-{index}", f"10.0.0.{index}", Room(*room)) for index, room in enumerate(rooms)]


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
    nodes = nodes_of(*((size, 0) for size in sizes))
    placement = place(nodes, nodes[0], tp, pp, Room(cpus, 0))
    assert placement.bundles == tuple(Room(size, 0) for size in bundles)
    group_size = tp * pp // len(bundles)
    assert placement.bundle_of == tuple(rank // group_size for rank in range(tp * pp))


@pytest.mark.parametrize(
    ("rooms", "tp", "pp", "bundles"),
    [
        (((8, 2), (8, 2)), 2, 2, ((4, 2), (4, 2))),
        (((8, 4), (8, 0)), 2, 2, ((4, 2), (4, 2))),  # where the GPUs are
        (((8, 1), (8, 3)), 4, 1, ((2, 1),) * 4),  # CPUs would do, but GPUs do not
        (((8, 0),), 2, 1, ((2, 1),) * 2),  # will never be
    ],
)
def test_gpus_count_as_cpus_do(rooms, tp, pp, bundles):
    nodes = nodes_of(*rooms)
    placement = place(nodes, nodes[0], tp, pp, Room(2, 1))
    assert placement.bundles == tuple(Room(*bundle) for bundle in bundles)


def test_what_is_asked_for_and_what_there_is_is_said_in_words():
    four = Room(4, 1)
    assert str(Placement((four, four, four), ())) == (
        "4 CPUs and 1 GPU on the node of rank 0, 2 times 4 CPUs and 1 GPU"
    )
    assert str(Placement((Room(1, 0),), ())) == "1 CPU and 0 GPUs on the node of rank 0"
    assert describe(nodes_of((1, 0), (2.5, 2)), Room(1, 1)) == (
        "10.0.0.0 with 1 CPU and 0 GPUs, 10.0.0.1 with 2.5 CPUs and 2 GPUs; "
        "free are 1 CPU and 1 GPU"
    )
