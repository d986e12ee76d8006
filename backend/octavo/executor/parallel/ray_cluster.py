"""`RayCluster`: a Ray cluster as its driver sees it; places ranks, and explains how they ended.

With `ray_rank` the only module that imports Ray. Knows nothing of what ranks do.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.errors import EngineError, first_line
from octavo.executor.parallel.ray_messages import Start, Started
from octavo.executor.parallel.ray_placement import Node, Room, describe, place
from octavo.executor.parallel.ray_rank import RayRank

#: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
_NODE_ID_LABEL = "ray.io/node-id"
_PROBE_TIMEOUT_S = 1.0
_MAX_REASON = 300


class RayCluster:
    """Become a driver of a cluster; what it starts ends with this process at the latest.

    Args:
        address: HOST:PORT, or `auto`.

    Raises:
        EngineError: there is no such cluster, or this machine is no node of it.
    """

    def __init__(self, address: str) -> None:
        if address != "auto":
            _reach(address)
        try:
            # What ranks log comes on another way, and what Ray has to say is asked for.
            context = ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:
            raise EngineError(
                f"the Ray cluster at {address} cannot be joined, of which this machine must be a "
                f"node: {first_line(error.__cause__ or error)}"
            ) from error
        self._address = context.address_info["gcs_address"]
        own_id = ray.get_runtime_context().get_node_id()
        self._own = next(node for node in _nodes() if node.id == own_id)
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._node_of: dict[int, str] = {}

    @property
    def host(self) -> str:
        """Address of this machine as other nodes reach it."""
        return self._own.host

    def start(self, request: Start) -> Started:
        """Reserve what ranks need, and start all but rank zero.

        Raises:
            EngineError: the cluster has no room in the given time.
        """
        tp, pp = request.tensor_parallel_size, request.pipeline_parallel_size
        need = Room(request.num_cpus, request.num_gpus)
        placement = place(_nodes(), self._own, tp, pp, need)
        others: list[dict[str, str]] = [{} for _ in placement.bundles[1:]]
        self._group = placement_group(
            [_resources(room) for room in placement.bundles],
            strategy="PACK",
            bundle_label_selector=[{_NODE_ID_LABEL: self._own.id}, *others],
        )
        if not self._group.wait(request.place_timeout_s):
            free = _room(ray.available_resources())
            raise EngineError(
                f"the Ray cluster at {self._address} has no room for {tp * pp} ranks within "
                f"{request.place_timeout_s:g} s: asked for are {placement}; it has "
                f"{describe(_nodes(), free)}"
            )
        node_of = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {node.id: node.host for node in _nodes()}
        for rank in range(1, tp * pp):
            bundle = placement.bundle_of[rank]
            self._node_of[rank] = node_of[bundle]
            self._begin(rank, bundle, hosts[node_of[bundle]], request)
        gpu = self._hold_gpu(request) if request.num_gpus else None
        return Started(tuple(hosts[self._node_of[rank]] for rank in range(1, tp * pp)), gpu)

    def explain(self, rank: int, timeout_s: float) -> str | None:
        """Say how a rank ended, if it does in time, in words that follow its name."""
        if lost := self._lost_node(rank):
            return lost
        ended, _ = ray.wait([self._ends[rank]], timeout=timeout_s)
        if not ended:
            return None
        try:
            ray.get(self._ends[rank])
        except RayError as error:
            return f"died: {_reason(error)}"
        return "ended"

    def leave(self) -> None:
        """End all ranks, and give back what was reserved."""
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _begin(self, rank: int, bundle: int, host: str, request: Start) -> None:
        serve = self._make_actor(rank, bundle, request).serve
        self._ends[rank] = serve.remote(rank, host, request.address, request.key)

    def _hold_gpu(self, request: Start) -> str:
        """Keep rank zero's GPU from the others; return what Ray calls it.

        Ray tells which of a bundle's GPUs is whose to actors alone, and rank zero is none.
        """
        gpu: str = ray.get(self._make_actor(0, 0, request).gpu.remote())
        return gpu

    def _make_actor(self, rank: int, bundle: int, request: Start) -> Any:
        actor_class = ray.remote(RayRank).options(
            name=f"octavo-rank-{rank}",
            num_cpus=request.num_cpus,
            num_gpus=request.num_gpus,
            max_restarts=0,
            runtime_env={"env_vars": request.environment} if request.environment else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
        )
        self._actors[rank] = actor_class.remote()
        return self._actors[rank]

    def _lost_node(self, rank: int) -> str | None:
        """Say that the node of a rank is lost, if it is; Ray itself takes a while to find out."""
        node = next((each for each in ray.nodes() if each["NodeID"] == self._node_of[rank]), None)
        if node is None:
            return "is lost with its node"
        host, port = node["NodeManagerAddress"], node["NodeManagerPort"]
        reason = node["DeathReasonMessage"] or f"no raylet answers at {host}:{port}"
        if node["Alive"] and _answers(host, port):
            return None
        return f"is lost with its node: {reason}"


def _nodes() -> list[Node]:
    """Return the nodes that are alive, by their addresses."""
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], _room(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.host)


def _room(resources: Mapping[str, float]) -> Room:
    return Room(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _resources(room: Room) -> dict[str, float]:
    """Return what a bundle asks for; Ray takes no zero."""
    asked = {"CPU": room.num_cpus, "GPU": room.num_gpus}
    return {name: number for name, number in asked.items() if number}


def _reach(address: str) -> None:
    """Raise EngineError if nobody listens at an address: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        raise EngineError(f"no Ray cluster is reached at {address}: {error}") from error


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _reason(error: RayError) -> str:
    """Return what of Ray's explanation says what happened."""
    text = " ".join(str(error).split())
    text = re.split(r"(?:is dead|died) because ", text, maxsplit=1)[-1]
    return text.split(" Some common causes")[0][-_MAX_REASON:]
