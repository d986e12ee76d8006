"""Who reaches a server: where it listens, TLS in both directions, and what is behind a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
from click.testing import CliRunner

from octavo.cli import main
from octavo.local.guardian import MARKER, SHARED_MEMORY
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer
from octavo_client import AsyncClient, Client, Unavailable, tls_credentials

pytestmark = pytest.mark.e2e

KEY = {"triton-grpc-protocol-octavo-key": "open sesame"}
#: Names that lead to this machine alone; not every machine speaks IPv6.
LOOPBACKS = ["localhost", *("::1" for each in psutil.net_if_addrs()["lo"] if each.address == "::1")]
RESTRICTED = (
    "inference,health,metadata,model-repository,shared-memory,trace,logging,statistics"
    ":octavo-key=open sesame"
)


@dataclass(frozen=True)
class Sealed:
    """A server that only talks TLS, to clients with a certificate and a key."""

    server: TritonServer
    files: Mapping[str, Path]
    """What a client needs: `ca`, `cert` and `key`."""

    def client(self, headers: Mapping[str, str] = KEY, **files: Path) -> Client:
        """Make a client; `files` replace the right ones."""
        credentials = tls_credentials(**{**self.files, **files})
        return Client(self.server.grpc_url, credentials=credentials, headers=headers)

    def run(self, *command: str, **options: Any) -> Any:
        """Run a command of the `octavo` program with what a client needs."""
        name, *arguments = command
        given = [f"--{what}={path}" for what, path in self.files.items()]
        headers = [f"--header={header}={value}" for header, value in KEY.items()]
        url = f"--url={self.server.grpc_url}"
        return CliRunner().invoke(main, [name, url, *given, *headers, *arguments], **options)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def sealed(
    authority: trustme.CA, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sealed]:
    folder = tmp_path_factory.mktemp("pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name in ("server", "client"):
        leaf = authority.issue_cert("127.0.0.1")
        leaf.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        leaf.private_key_pem.write_to_path(folder / f"{name}.key")
    flags = (
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={folder / 'server.pem'}",
        f"--grpc-server-key={folder / 'server.key'}",
        f"--grpc-root-cert={folder / 'ca.pem'}",
        f"--grpc-restricted-protocol={RESTRICTED}",
        f"--http-restricted-api={RESTRICTED}",
    )
    files = {"ca": folder / "ca.pem", "cert": folder / "client.pem", "key": folder / "client.key"}
    with _started(tiny_checkpoint, flags=flags) as server:
        yield Sealed(server, files)


@contextlib.contextmanager
def _started(checkpoint: Path, **options: Any) -> Iterator[TritonServer]:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    environment = {"OCTAVO_CPU_THREADS": "1", "OCTAVO_NUM_KV_BLOCKS": "1024"}
    server = TritonServer(
        ServerOptions(str(checkpoint), device="cpu", environment=environment, **ports, **options)
    )
    server.start()
    try:
        server.wait_ready(120.0)
        yield server
    finally:
        server.kill()


def _addresses(server: TritonServer) -> set[str]:
    """Return every address on which the server or one of its children listens."""
    process = psutil.Process(server.pid)
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_the_server_listens_on_loopback_only(tiny_server: TritonServer) -> None:
    assert _addresses(tiny_server) == {"127.0.0.1"}


def test_no_other_user_can_read_what_passes_through_shared_memory_or_files(
    tiny_server: TritonServer,
) -> None:
    name = psutil.Process(tiny_server.pid).environ()[MARKER]
    files = list(SHARED_MEMORY.glob(f"{name}*"))
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (Path(tempfile.gettempdir()) / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_server_of_another_loopback_address_is_reached_by_the_urls_it_tells(
    host: str, tiny_checkpoint: Path
) -> None:
    with _started(tiny_checkpoint, host=host) as server, Client(server.grpc_url) as client:
        assert client.generate("Hello", max_tokens=2).num_output_tokens == 2
        with urllib.request.urlopen(server.metrics_url) as answer:
            assert b"octavo_" in answer.read()
        assert len(_addresses(server)) == 1
        assert _addresses(server) <= {"127.0.0.1", "::1"}


def test_every_method_of_the_client_works_through_tls_and_a_key(sealed: Sealed) -> None:
    with sealed.client() as client:
        assert client.is_ready()
        assert client.health() > 0
        assert "block_size" in client.inspect()
        assert client.generate("Hello", max_tokens=3).num_output_tokens == 3
        messages = [{"role": "user", "content": "Hello"}]
        assert "".join(delta.text for delta in client.stream(messages=messages, max_tokens=3))


def test_every_method_of_the_async_client_does_too(sealed: Sealed) -> None:
    async def use() -> int:
        credentials = tls_credentials(**sealed.files)
        async with AsyncClient(
            sealed.server.grpc_url, credentials=credentials, headers=KEY
        ) as client:
            assert await client.is_ready()
            assert await client.health() > 0
            assert "block_size" in await client.inspect()
            return sum(
                [delta.num_output_tokens async for delta in client.stream("a", max_tokens=3)]
            )

    assert asyncio.run(use()) == 3


def test_every_command_does_too(sealed: Sealed) -> None:
    generated = sealed.run("generate", "Hello", "--max-tokens=3")
    assert (generated.exit_code, bool(generated.stdout.strip())) == (0, True)
    assert sealed.run("chat", "--max-tokens=3", input="Hello\n").exit_code == 0
    assert sealed.run("health").stdout.startswith("ok: octavo at ")
    assert "block_size" in json.loads(sealed.run("inspect", "--json").stdout)


def test_a_key_can_come_by_the_environment_where_no_process_list_shows_it(sealed: Sealed) -> None:
    lines = "\n".join(f"{name}={value}" for name, value in KEY.items())
    given = [f"--{what}={path}" for what, path in sealed.files.items()]
    result = CliRunner().invoke(
        main,
        ["health", f"--url={sealed.server.grpc_url}", *given],
        env={"OCTAVO_HEALTH_HEADERS": f"{lines}\nx-other=two words"},
        auto_envvar_prefix="OCTAVO",
    )
    assert result.exit_code == 0, result.stderr


def test_who_lacks_the_key_is_told_the_headers_name(sealed: Sealed) -> None:
    for headers in ({}, {"triton-grpc-protocol-octavo-key": "wrong"}):
        with sealed.client(headers) as client:
            assert not client.is_ready()
            with pytest.raises(Unavailable, match=r"restricted.*'triton-grpc-protocol-octavo-key'"):
                client.generate("Hello", max_tokens=1)


def test_who_has_no_certificate_or_trusts_another_authority_gets_no_connection(
    sealed: Sealed, tmp_path: Path
) -> None:
    stranger = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(stranger)
    with (
        sealed.client(ca=stranger) as client,
        pytest.raises(Unavailable, match=r"no encrypted connection to .*: self signed"),
    ):
        client.generate("Hello", max_tokens=1)
    only_ca = tls_credentials(ca=sealed.files["ca"])
    for credentials in (only_ca, None):
        with (
            Client(sealed.server.grpc_url, credentials=credentials, headers=KEY) as client,
            pytest.raises(Unavailable),
        ):
            client.generate("Hello", max_tokens=1)


def test_restricted_http_opens_with_the_key_alone(sealed: Sealed) -> None:
    url = f"{sealed.server.http_url}/v2/models/octavo/generate"
    data = json.dumps({"text_input": "Hello", "max_tokens": 2}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data))
    with refused.value as error:
        assert (error.code, "octavo-key" in error.read().decode()) == (403, True)
    headers = {"octavo-key": "open sesame"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        assert json.load(answer)["text_output"].startswith("Hello")


@pytest.mark.parametrize(
    "path",
    ["repository/index", "systemsharedmemory/region/a/register", "logging", "trace/setting"],
)
def test_what_changes_the_server_can_be_closed_too(sealed: Sealed, path: str) -> None:
    request = urllib.request.Request(f"{sealed.server.http_url}/v2/{path}", b"{}")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


def test_no_key_is_in_the_log(sealed: Sealed) -> None:
    text = "\n".join(map(str, sealed.server.records))
    assert "octavo" in text
    assert "open sesame" not in text
