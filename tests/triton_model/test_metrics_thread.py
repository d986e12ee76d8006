"""The thread that writes metrics outlives faults of the server and holds up no end."""

from __future__ import annotations

import threading

import pytest

from octavo.triton_model import metrics_thread


def test_a_thread_that_cannot_write_tries_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_thread, "FAILURE_PAUSE_S", 0.0)
    faults, written = [RuntimeError("no round trip")], threading.Event()

    def write() -> None:
        if faults:
            raise faults.pop()
        written.set()

    thread = metrics_thread.MetricsThread(write)
    thread.start()
    thread.wake()
    assert written.wait(10.0)
    thread.close()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics could not be written; they are kept for the next time"
    ]


def test_a_server_that_hangs_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_thread, "CLOSE_TIMEOUT_S", 0.05)
    answer = threading.Event()
    thread = metrics_thread.MetricsThread(answer.wait)
    thread.start()
    thread.close()
    assert "could not be written within 0.05 s" in caplog.text
    answer.set()
