import threading
import time

import pytest

import octavo_client.transport
from octavo_client import Client, RequestCancelled, Unavailable


def test_no_server_is_an_error_that_names_the_address(free_url):
    with (
        Client(free_url) as client,
        pytest.raises(Unavailable, match=f"no gRPC server answers at {free_url}: Connection ref"),
    ):
        client.generate("hi")


def test_a_stopping_server_ends_live_streams_at_once(server, client):
    server.plays(server.delta("a"), server.HANG)
    deltas = client.stream("hi")
    next(deltas)
    threading.Timer(0.05, server.stop).start()
    with pytest.raises((Unavailable, RequestCancelled)):
        next(deltas)


def test_a_killed_server_ends_all_streams_at_once(server, relay):
    server.plays(server.delta("a"), server.HANG)
    with Client(relay.url) as client:
        streams = [client.stream("hi") for _ in range(8)]
        assert [next(deltas).text for deltas in streams] == ["a"] * 8
        started = time.monotonic()
        relay.cut()
        for deltas in streams:
            with pytest.raises(Unavailable, match=f"server {relay.url} is unavailable"):
                next(deltas)
        assert time.monotonic() - started < 1


def test_a_server_that_fell_silent_is_given_up_for_lost(server, relay, monkeypatch):
    monkeypatch.setattr(octavo_client.transport, "_KEEPALIVE_TIMEOUT_S", 0.3)
    server.plays(server.delta("a"), server.HANG)
    with Client(relay.url, keepalive_s=0.3) as client:
        deltas = client.stream("hi")
        next(deltas)
        relay.freeze()
        with pytest.raises(Unavailable):
            next(deltas)


def test_a_client_finds_a_restarted_server_again(server, relay):
    with Client(relay.url) as client:
        assert client.generate("hi").text == "ok"
        relay.cut()
        with pytest.raises(Unavailable):
            client.generate("hi")
        port = int(relay.url.rpartition(":")[2])
        revived = type(relay)(server.port, port)
        deadline = time.monotonic() + 5
        while not client.is_ready():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.generate("hi").text == "ok"
        revived.cut()
