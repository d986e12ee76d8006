"""The control ring: every reader hears every message once, whole and in order."""

from __future__ import annotations

import os
import threading
import time

import pytest

from octavo.errors import EngineError
from octavo.executor.parallel.control import CAPACITY, ControlReader, ControlWriter


@pytest.fixture
def make_ring():
    """Make a writer and its readers; each reader has a descriptor of its own, as a process has."""
    writers = []

    def make(num_readers: int = 1) -> tuple[ControlWriter, list[ControlReader]]:
        writer = ControlWriter(num_readers)
        writers.append(writer)
        readers = [ControlReader(os.dup(writer.fd), num_readers, i) for i in range(num_readers)]
        return writer, readers

    yield make
    for writer in writers:
        writer.close()


def hear(reader: ControlReader, count: int) -> tuple[threading.Thread, list[bytes]]:
    """Let a thread read; return it and what it has heard."""
    heard: list[bytes] = []
    thread = threading.Thread(
        target=lambda: [heard.append(reader.receive()) for _ in range(count)], daemon=True
    )
    thread.start()
    return thread, heard


def test_every_reader_hears_all_in_order(make_ring):
    writer, readers = make_ring(3)
    messages = [bytes([index]) * index for index in range(50)]
    for message in messages:
        writer.send(message, 1.0)
    for reader in readers:
        assert [reader.receive() for _ in messages] == messages


def test_messages_go_on_where_the_memory_ends(make_ring):
    writer, (reader,) = make_ring()
    message = os.urandom(CAPACITY // 3 + 5)
    for _ in range(20):
        writer.send(message, 1.0)
        assert reader.receive() == message


def test_a_message_longer_than_the_ring_goes_in_pieces(make_ring):
    writer, readers = make_ring(2)
    message = os.urandom(3 * CAPACITY + 7)
    threads = [hear(reader, 1) for reader in readers]
    writer.send(message, 30.0)
    for thread, heard in threads:
        thread.join(30.0)
        assert heard == [message]


def test_a_reader_that_sleeps_is_woken(make_ring):
    writer, (reader,) = make_ring()
    thread, heard = hear(reader, 1)
    time.sleep(0.05)  # long past its looking
    started_s = time.monotonic()
    writer.send(b"now", 1.0)
    thread.join(5.0)
    assert heard == [b"now"]
    assert time.monotonic() - started_s < 0.5, "it slept on"


def test_a_reader_that_does_not_read_is_told_of(make_ring):
    writer, (quick, _) = make_ring(2)
    thread, _ = hear(quick, 1)
    with pytest.raises(EngineError, match=r"^the control ring is full: a rank does not read it$"):
        writer.send(bytes(2 * CAPACITY), 0.05)
    assert thread.is_alive()


def test_an_empty_message_is_a_message(make_ring):
    writer, (reader,) = make_ring()
    writer.send(b"", 1.0)
    writer.send(b"x", 1.0)
    assert [reader.receive(), reader.receive()] == [b"", b"x"]


def test_the_memory_has_no_name(make_ring):
    writer, _ = make_ring(2)
    assert os.readlink(f"/proc/self/fd/{writer.fd}") == "/memfd:octavo-control (deleted)"
