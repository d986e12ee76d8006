"""Ranks of several machines hear of every step in order, and nobody else is let in."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import EngineError
from octavo.executor.parallel.keyed_tcp import (
    KEY_BYTES,
    KeyedListener,
    TcpStepReader,
    TcpSteps,
    connect,
)


@pytest.fixture
def listener():
    listener = KeyedListener("127.0.0.1")
    yield listener
    listener.close()


def meet(listener, key=None, timeout_s=5.0):
    """Connect to a listener; return both ends, of which one may be an error."""
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(connect, listener.address, key or listener.key, 5.0)
        ours = listener.accept(timeout_s)
    return ours, theirs.exception() or theirs.result()


def test_messages_of_any_size_come_whole_and_in_order(listener):
    pairs = [meet(listener) for _ in range(2)]
    steps = TcpSteps([ours for ours, _ in pairs])
    messages = [b"a", b"x" * 20_000, b"", b"b" * 16_384]
    for message in messages:
        steps.send(message, 5.0)
    for _, theirs in pairs:
        reader = TcpStepReader(theirs)
        assert [reader.receive() for _ in messages] == messages


def test_objects_and_steps_share_a_connection(listener):
    ours, theirs = meet(listener)
    ours.send({"blocks": 7})
    TcpSteps([ours]).send(b"step", 5.0)
    theirs.send("ready")
    assert theirs.recv() == {"blocks": 7}
    assert TcpStepReader(theirs).receive() == b"step"
    assert ours.recv() == "ready"


def test_every_listener_has_a_key_of_its_own(listener):
    other = KeyedListener("127.0.0.1")
    assert len(other.key) == KEY_BYTES
    assert other.key != listener.key
    other.close()


def test_who_has_another_key_is_refused_and_the_next_is_taken_in(listener, caplog):
    ours, theirs = meet(listener, b"k" * KEY_BYTES, timeout_s=0.5)
    assert ours is None
    assert isinstance(theirs, OSError)
    assert "127.0.0.1 connected without the key of this engine and is refused" in caplog.text
    ours, theirs = meet(listener)
    theirs.send_bytes(b"a")
    assert ours.recv_bytes() == b"a"


def test_who_connects_and_leaves_is_refused(listener):
    socket.create_connection(listener.address).close()
    assert listener.accept(0.2) is None


def test_nobody_is_waited_for_longer_than_asked(listener):
    assert listener.accept(0.01) is None


def test_a_rank_that_takes_nothing_ends_the_wait(listener):
    ours, _theirs = meet(listener)
    steps = TcpSteps([ours])
    with pytest.raises(EngineError, match=r"^a rank does not hear of a step: "):
        steps.send(bytes(100 << 20), 0.05)  # more than the kernel keeps


def test_the_others_hear_of_a_step_when_one_is_gone(listener):
    (gone, other_end), (there, theirs) = meet(listener), meet(listener)
    other_end.close()
    gone.close()
    with pytest.raises(EngineError, match=r"^a rank does not hear of a step: "):
        TcpSteps([gone, there]).send(b"a", 5.0)
    assert TcpStepReader(theirs).receive() == b"a"


def test_a_rank_notices_that_rank_zero_is_gone(listener):
    ours, theirs = meet(listener)
    ours.close()
    with pytest.raises(EngineError, match=r"^rank 0 is gone$"):
        TcpStepReader(theirs).receive()
