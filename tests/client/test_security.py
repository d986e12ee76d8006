"""Headers that open what is restricted, and the files that TLS is made of."""

import pytest

from octavo_client import AsyncClient, Client, InvalidRequest, tls_credentials


def test_headers_go_with_every_call_their_names_in_small_letters(server):
    with Client(server.url, headers={"Authorization": "Bearer a=b", "x-key": ""}) as client:
        client.generate("hi")
    assert server.metadata["authorization"] == "Bearer a=b"
    assert server.metadata["x-key"] == ""


@pytest.mark.parametrize("name", ["", "two words", "ü", "a\n", "grpc-timeout", "x-bin", ":path"])
def test_a_header_that_cannot_be_sent_is_refused_by_name(server, name):
    with pytest.raises(InvalidRequest) as refused:
        Client(server.url, headers={name: "secret"})
    assert str(refused.value) == (
        f"header {name!r} must be of letters, digits, '_', '.' and '-', "
        "and may neither begin with grpc- nor end with -bin"
    )


@pytest.mark.parametrize("value", ["secret\n", "sécret", "secret\0"])
def test_a_value_that_cannot_be_sent_is_refused_and_not_shown(server, value):
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest) as refused:
            kind(server.url, headers={"x-key": value})
        assert str(refused.value) == "the value of header 'x-key' must be of printable ASCII"


def test_certificate_and_key_come_together(tmp_path):
    with pytest.raises(InvalidRequest, match=r"^cert is given without key but must have it"):
        tls_credentials(cert=tmp_path / "c.pem")
    with pytest.raises(InvalidRequest, match=r"^key is given without cert but must have it"):
        tls_credentials(key=tmp_path / "c.key")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"absent\.pem"):
        tls_credentials(ca=tmp_path / "absent.pem")
