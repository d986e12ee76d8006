"""A device that waits for a rank in vain is not waited for in vain."""

import pytest
import torch

from octavo.errors import EngineError
from octavo.executor.parallel.step_watch import StepWatch, make_step_watch


class Ranks:
    """Other ranks, of which one may be gone from its second look on."""

    def __init__(self, is_gone=False):
        self.num_checks = 0
        self._is_gone = is_gone

    def check(self):
        self.num_checks += 1
        if self._is_gone and self.num_checks == 2:
            raise EngineError("rank 1 died")

    def explain(self, noticed):
        return EngineError(f"no answer from rank 1: {noticed}")


class Device:
    """A stream whose work ends after some queries, each of which takes 10 ms."""

    def __init__(self, num_queries=10**9):
        self.now_s, self.num_queries = 0.0, num_queries
        self.calls = []

    def record_event(self):
        self.calls.append("record")
        return self

    def query(self):
        self.calls.append("query")
        self.now_s += 0.01
        return self.calls.count("query") >= self.num_queries

    def clock(self):
        return self.now_s


def watch_of(device, ranks, timeout_s=5.0):
    return StepWatch(device.record_event, ranks, timeout_s, device.clock)


def test_a_step_is_marked_when_queued_and_waited_for_later():
    device, ranks = Device(num_queries=3), Ranks()
    watch = watch_of(device, ranks)
    watch.mark()
    assert device.calls == ["record"]
    watch.wait()
    assert device.calls == ["record", *["query"] * 3]
    watch.wait()
    assert device.calls.count("query") == 3, "a step is waited for once"
    assert ranks.num_checks == 0, "a short step looks at no other process"


def test_a_rank_that_is_gone_is_named_while_the_device_still_waits():
    device = Device()
    watch = watch_of(device, Ranks(is_gone=True))
    watch.mark()
    with pytest.raises(EngineError, match=r"^rank 1 died$"):
        watch.wait()
    assert device.now_s < 0.2


def test_a_step_that_takes_too_long_is_explained():
    device = Device()
    watch = watch_of(device, Ranks())
    watch.mark()
    with pytest.raises(EngineError) as error:
        watch.wait()
    assert str(error.value) == "no answer from rank 1: a step was not done within 5 s"
    assert device.now_s == pytest.approx(5.0, abs=0.05)


def test_where_the_host_computes_there_is_nothing_to_wait_for():
    watch = StepWatch(None, Ranks(is_gone=True), 0.0)
    watch.mark()
    watch.wait()


def test_a_gpu_is_watched_on_the_stream_that_is_current_when_the_model_is_loaded(monkeypatch):
    device, asked = Device(num_queries=1), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: asked.append(str(on)) or device)
    watch = make_step_watch(torch.device("cuda", 3), Ranks(), 5.0)
    watch.mark()
    watch.wait()
    assert (asked, device.calls) == (["cuda:3"], ["record", "query"])
    assert make_step_watch(torch.device("cpu"), Ranks(), 5.0).wait() is None
