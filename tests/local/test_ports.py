"""Ports are checked before anything is started."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.local.ports import claim_ports, hold_ports


def test_zero_becomes_a_free_port_of_its_own() -> None:
    ports = claim_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
    assert len(set(ports.values())) == 3
    assert claim_ports("127.0.0.1", ports) == ports


def test_a_free_port_is_none_that_connections_are_given_while_the_server_starts() -> None:
    ports = claim_ports("127.0.0.1", dict.fromkeys(map(str, range(50)), 0))
    assert all(20_000 <= port < 30_000 for port in ports.values())


def test_taken_port_is_named_with_the_option_that_changes_it(taken_port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        claim_ports("127.0.0.1", {"http": 0, "grpc": taken_port})
    assert str(caught.value) == (
        f"grpc port {taken_port} of 127.0.0.1 cannot be used: Address already in use; "
        "choose another with --grpc-port"
    )


def test_one_port_for_two_services_is_refused() -> None:
    port = claim_ports("127.0.0.1", {"http": 0})["http"]
    with pytest.raises(ConfigError, match=f"^metrics port {port} of"):
        claim_ports("127.0.0.1", {"http": port, "metrics": port})


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"^http port is {port} but must be from 0 to 65535$"):
        claim_ports("127.0.0.1", {"http": port})


def test_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of 192\.0\.2\.1 cannot be used"):
        claim_ports("192.0.2.1", {"http": 0})


def test_ports_of_a_server_that_has_not_bound_them_yet_are_refused_to_another() -> None:
    ports = claim_ports("127.0.0.1", {"http": 0, "grpc": 0})
    message = f"^grpc port {ports['grpc']} of localhost cannot be used: another octavo serve is st"
    with hold_ports("127.0.0.1", ports):
        with pytest.raises(ConfigError, match=message):
            hold_ports("localhost", {"metrics": 1, "grpc": ports["grpc"]})
        hold_ports("127.0.0.2", ports).close()
    hold_ports("localhost", {"metrics": 1, **ports}).close()
