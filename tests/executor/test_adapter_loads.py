"""Adapters are read while whoever asked for them goes on, and every load is told of once."""

from __future__ import annotations

import threading

from octavo.adapter import AdapterArrival, AdapterLoad
from octavo.errors import EngineError
from octavo.executor.adapter_loads import AdapterLoads, ArrivedAdapters

PATIENCE_S = 30.0


def test_nobody_waits_for_a_load_but_who_says_so():
    allowed, read = threading.Event(), []

    def wait_and_read(load: AdapterLoad) -> None:
        assert allowed.wait(PATIENCE_S)
        read.append(load)

    arrived = ArrivedAdapters()
    loads = AdapterLoads(wait_and_read, arrived.put)
    loads.start([AdapterLoad(5, slot=0), AdapterLoad(2, slot=1)])
    assert (arrived.pop(), arrived.pop(0.001), read) == ((), (), [])
    allowed.set()
    told = arrived.pop(PATIENCE_S)
    while len(told) < 2:
        told += arrived.pop(PATIENCE_S)
    assert told == (AdapterArrival(5), AdapterArrival(2))
    assert read == [AdapterLoad(5, slot=0), AdapterLoad(2, slot=1)]


def test_a_load_that_fails_is_told_with_its_error_and_those_behind_it_are_read(caplog):
    known = EngineError("gone")

    def fail(load: AdapterLoad) -> None:
        if load.number < 2:
            raise known if load.number == 0 else RuntimeError("a path that is not for clients")

    arrived = ArrivedAdapters()
    AdapterLoads(fail, arrived.put).start(AdapterLoad(number, slot=0) for number in range(3))
    told: list[AdapterArrival] = []
    while len(told) < 3:
        told += arrived.pop(PATIENCE_S)
    assert told[0] == AdapterArrival(0, known)
    assert str(told[1].error) == "the adapter could not be read; the engine's log says why"
    assert told[2] == AdapterArrival(2)
    assert "a path that is not for clients" in caplog.text
