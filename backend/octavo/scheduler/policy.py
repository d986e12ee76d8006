"""Who goes first: the orders that the scheduler can serve sequences in.

A policy only compares sequences and, if it shares fairly, counts what each tenant got. Knows
nothing of queues, blocks, steps or the clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import nlargest
from operator import itemgetter
from typing import Protocol

from octavo.config import SCHEDULING_POLICIES
from octavo.errors import ConfigError, shown
from octavo.scheduler.late_heap import LateHeap
from octavo.sequence import Sequence
from octavo.tenant_weights import read_tenant_weights

#: Tenants without requests whose counters are remembered for sure.
MAX_IDLE_TENANTS = 1024


class Policy(Protocol):
    """An order of sequences.

    Every sequence, forks too, is told to `arrive` once and to `leave` once.
    """

    def group(self, sequence: Sequence) -> Hashable:
        """Return what it shares with sequences that it follows by order of arrival alone."""

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Return its place among all sequences; the lowest goes first, and no two are equal.

        It rises within a group, and may rise, never fall, while the sequence lives.
        """

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether `waiting` may be admitted before, and in place of, `running`."""

    def may_pass(self, later: Sequence, earlier: Sequence) -> bool:
        """Return whether `later` may begin at once where `earlier` has to wait for something."""

    def arrive(self, sequence: Sequence) -> None:
        """Learn that its tenant has one more live sequence."""

    def leave(self, sequence: Sequence) -> None:
        """Learn that its tenant has one live sequence less."""

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Learn that a live sequence advances by `num_tokens`, not counting repeated work.

        To be told as the step is planned, before the next sequence is admitted: then whoever runs
        is charged already, and several places that are free in one step are shared as well.
        """


class FcfsPolicy:
    """First come, first served; the forks of a request in order of their index."""

    def group(self, sequence: Sequence) -> Hashable:
        """Return the same for all."""
        return None

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Return its place in the order of arrival."""
        return (sequence.arrival_number, sequence.index)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether `waiting` ranks lower: it ran before, or others passed it meanwhile."""
        return self.rank(waiting) < self.rank(running)

    def may_pass(self, later: Sequence, earlier: Sequence) -> bool:
        """Return True: `earlier` goes first as soon as it can."""
        return True

    def arrive(self, sequence: Sequence) -> None:
        """Do nothing."""

    def leave(self, sequence: Sequence) -> None:
        """Do nothing."""

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Do nothing."""


class PriorityPolicy(FcfsPolicy):
    """Lower priorities first, even if others must make room; equals in order of arrival."""

    def group(self, sequence: Sequence) -> Hashable:
        """Return its priority."""
        return sequence.request.priority

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Return its priority, then its place in the order of arrival."""
        return (sequence.request.priority, sequence.arrival_number, sequence.index)

    def may_pass(self, later: Sequence, earlier: Sequence) -> bool:
        """Return whether both are as urgent."""
        return later.request.priority == earlier.request.priority


class FairPolicy:
    """Equal service to tenants, by a virtual token counter for each.

    The counter grows by a token's share, 1 / weight, with each token its sequences advance; the
    tenant with the lowest is admitted next. A tenant that comes with none live is lifted to the
    lowest counter of those that have, so idle time earns no credit. Nobody is preempted for
    fairness: sequences run in the order of their admission, and the oldest always advances.

    After Sheng et al., "Fairness in serving large language models", OSDI 2024.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._num_live: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        """Of tenants with live sequences."""
        self._heap = LateHeap(self._counters, self._counters.__getitem__)
        self._idle_counters: dict[str, float] = {}
        self._last_floor = 0.0

    def group(self, sequence: Sequence) -> Hashable:
        """Return its tenant."""
        return sequence.request.tenant

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Return its tenant's counter, then its place in the order of arrival."""
        counter = self._counters[sequence.request.tenant]
        return (counter, sequence.arrival_number, sequence.index)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Return False: whoever was admitted stays ahead."""
        return False

    def may_pass(self, later: Sequence, earlier: Sequence) -> bool:
        """Return True: its tenant is charged for it."""
        return True

    def arrive(self, sequence: Sequence) -> None:
        """Lift its tenant's counter if it has no other live sequence."""
        tenant = sequence.request.tenant
        if tenant not in self._num_live:
            floor = self._floor
            self._num_live[tenant] = 0
            self._counters[tenant] = max(floor, self._idle_counters.pop(tenant, floor))
            self._heap.push(tenant)
        self._num_live[tenant] += 1

    def leave(self, sequence: Sequence) -> None:
        """Remember its tenant's counter when its last live sequence leaves."""
        tenant = sequence.request.tenant
        self._num_live[tenant] -= 1
        if self._num_live[tenant] == 0:
            del self._num_live[tenant]
            self._last_floor = self._floor
            self._idle_counters[tenant] = self._counters.pop(tenant)
            if len(self._idle_counters) > 2 * MAX_IDLE_TENANTS:
                self._forget_idle()

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge its tenant."""
        tenant = sequence.request.tenant
        self._counters[tenant] += num_tokens / self._weights.get(tenant, 1.0)

    @property
    def _floor(self) -> float:
        lowest: tuple[float, str] | None = self._heap.lowest()
        return self._last_floor if lowest is None else lowest[0]

    def _forget_idle(self) -> None:
        # Those at the floor would be lifted anyway; of the others the lowest gain the least.
        floor = self._floor
        ahead = (item for item in self._idle_counters.items() if item[1] > floor)
        self._idle_counters = dict(nlargest(MAX_IDLE_TENANTS, ahead, key=itemgetter(1)))


def make_policy(name: str, tenant_weights: str = "") -> Policy:
    """Return the policy of this name; `tenant_weights` as in the engine's options.

    Raises:
        ConfigError: there is no such policy, or the weights cannot be read.
    """
    weights = read_tenant_weights(tenant_weights)
    if name not in SCHEDULING_POLICIES:
        allowed = ", ".join(SCHEDULING_POLICIES)
        raise ConfigError(f"option scheduling_policy is {shown(name)} but must be one of {allowed}")
    if name == "fair":
        return FairPolicy(weights)
    return PriorityPolicy() if name == "priority" else FcfsPolicy()
