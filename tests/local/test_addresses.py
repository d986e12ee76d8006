"""Addresses reach every part of Triton in the form that it understands."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.local.addresses import listen_address, numeric_address, reachable_address


@pytest.mark.parametrize(
    ("host", "http", "grpc", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1:80"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "127.0.0.1:80"),
        ("::1", "ipv6:::1", "[::1]", "[::1]:80"),
        ("::", "ipv6:::", "[::]", "[::1]:80"),
    ],
)
def test_an_address_is_written_as_each_part_reads_it(
    host: str, http: str, grpc: str, reached: str
) -> None:
    assert [listen_address(host, kind) for kind in ("http", "metrics")] == [http, http]
    assert listen_address(host, "grpc") == grpc
    assert reachable_address(host, 80) == reached


def test_a_name_becomes_a_number_for_triton_would_make_255_255_255_255_of_it() -> None:
    assert numeric_address("localhost") in ("127.0.0.1", "::1")
    assert "localhost" not in listen_address("localhost", "http")


def test_a_name_without_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^host 'no host' cannot be used: "):
        numeric_address("no host")
