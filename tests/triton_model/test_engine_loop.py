"""An engine that was idle begins with all who come close together, where it asks for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import ModuleType

import pytest

from octavo.config import EngineConfig
from octavo.engine_messages import EngineReady, Inspect, Inspected, Shutdown
from octavo.engine_process import run_engine
from octavo.request import Request, StepOutput
from octavo.sampling_params import SamplingParams

#: Longer than any test, so that a pause in which nothing comes is never over.
AGES_S = 1e5


@pytest.fixture
def start(fake_engine: ModuleType) -> Iterator[Callable[[float], Connection]]:
    """Return a function that runs an engine of such a pause; its owner's end comes back."""
    ends: list[tuple[Connection, threading.Thread]] = []

    def run(company_s: float) -> Connection:
        ours, theirs = Pipe()

        def make(config: EngineConfig) -> object:
            return fake_engine.FakeEngine(config, company_s=company_s)

        thread = threading.Thread(target=run_engine, args=(EngineConfig("fake"), theirs, make))
        thread.start()
        ends.append((ours, thread))
        assert isinstance(ours.recv(), EngineReady)
        assert ours.recv().outputs == (), "an idle engine tells its figures"
        return ours

    yield run
    for ours, thread in ends:
        ours.send(Shutdown())
        thread.join(10.0)
        assert not thread.is_alive()


def ask(engine: Connection, *names: str) -> None:
    for name in names:
        engine.send(Request(name, (5, 6, 7), SamplingParams(max_tokens=2, seed=0)))


def test_an_idle_engine_takes_all_who_come_before_a_pause(
    start: Callable[[float], Connection],
) -> None:
    engine = start(AGES_S)
    ask(engine, "a", "b", "c")
    engine.send(Inspect("i"))
    seen = engine.recv()
    assert isinstance(seen, Inspected), "no step has begun"
    assert seen.inspection.device.states.startswith("uuu.")


def test_a_stream_of_requests_does_not_keep_an_idle_engine_waiting(
    start: Callable[[float], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine_process.MOST_PAUSES", 0)
    engine = start(AGES_S)
    ask(engine, "a")
    assert engine.poll(10.0)
    assert isinstance(engine.recv(), StepOutput)


def test_an_engine_whose_requests_join_at_any_step_waits_for_nobody(
    start: Callable[[float], Connection],
) -> None:
    engine = start(0.0)
    ask(engine, "a")
    assert engine.poll(10.0)
    assert isinstance(engine.recv(), StepOutput)
