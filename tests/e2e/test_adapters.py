"""Adapters through the real server: chosen by request, loaded and unloaded while it serves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.local.bundle import write_repository
from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest, ServerError

pytestmark = pytest.mark.e2e

List = Callable[[Mapping[str, Path]], None]
Post = Callable[..., tuple[int, str]]

PARAMS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}
LOAD = "repository/models/octavo/load"
LOADED = (200, "")


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes an adapter of the tiny model, random by its seed."""

    def write(seed: int, rank: int = 2, hidden: int = 64) -> Path:
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            module = f"base_model.model.model.layers.{layer}.mlp.down_proj"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, 128, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["down_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture(scope="module")
def server(
    tiny_checkpoint: Path,
    save: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[TritonServer]],
) -> Iterator[TritonServer]:
    """Return a server that loads on demand, with adapters `first` and `second`, one in memory."""
    repository = tmp_path_factory.mktemp("models")
    options = {"model": str(tiny_checkpoint), "enable_lora": True, "max_loras": 1}
    write_repository(repository, options)
    listed = {"first": str(save(1)), "second": str(save(2))}
    (repository / "octavo" / "1" / "multi_lora.json").write_text(json.dumps(listed))
    with serving(
        repository=repository,
        environment={"OCTAVO_CPU_THREADS": "1", "OCTAVO_NUM_KV_BLOCKS": "4096"},
        flags=("--model-control-mode=explicit", "--load-model=octavo"),
    ) as server:
        yield server


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture
def list_adapters(server: TritonServer) -> List:
    """Return a function that writes the list of adapters, and does not load it."""
    assert server.options.repository is not None
    path = server.options.repository / "octavo" / "1" / "multi_lora.json"

    def write(adapters: Mapping[str, Path]) -> None:
        path.write_text(json.dumps({name: str(folder) for name, folder in adapters.items()}))

    return write


def text(client: Client, name: str | None, **params: Any) -> str:
    return client.generate("a", **PARAMS, lora_name=name, **params).text


def test_requests_at_once_are_answered_each_with_its_adapter(
    client: Client, tiny_server: TritonServer, server: TritonServer, post: Post
) -> None:
    names = [None, "first", "second"]
    alone = [text(client, name) for name in names]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda name: text(client, name), names * 4))
    assert together == alone * 4
    with Client(tiny_server.grpc_url, timeout_s=60) as other:
        assert text(other, None) == alone[0]  # a server without adapters
        with pytest.raises(InvalidRequest, match="model was loaded without adapters"):
            text(other, "first")
    body = {"text_input": "a", "exclude_input_in_output": True, **PARAMS, "lora_name": "second"}
    status, answer = post(server, "models/octavo/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, alone[2])


def test_an_unknown_adapter_is_refused_with_those_that_are_there(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"^lora_name is 'x' but must be one of 'first', 'se"):
        text(client, "x")


def test_an_adapter_whose_files_are_gone_ends_its_own_requests_by_name(
    server: TritonServer, client: Client
) -> None:
    assert server.options.repository is not None
    listed = json.loads((server.options.repository / "octavo/1/multi_lora.json").read_text())
    right = {name: text(client, name) for name in ("first", None, "second")}
    folder = Path(listed["first"])
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(ServerError, match=r"the files of adapter 'first' are gone or have chan"):
        text(client, "first")
    assert text(client, None) == right[None]
    moved.rename(folder)
    assert text(client, "first") == right["first"]


def test_a_load_takes_a_changed_list_over_while_streams_end_with_what_they_began_with(
    server: TritonServer,
    client: Client,
    list_adapters: List,
    save: Callable[..., Path],
    post: Post,
) -> None:
    """`second` is gone, `third` is new, and `first` is another version of itself."""
    right = client.generate("a", **LONG, lora_name="second").text
    old = text(client, "first")
    stream = client.stream("a", **LONG, lora_name="second")
    begun = next(stream).text
    list_adapters({"first": save(3), "third": save(4)})
    assert post(server, LOAD, {}) == LOADED
    with pytest.raises(
        InvalidRequest, match=r"^lora_name is 'second' but must be one of 'first', "
    ):
        text(client, "second")
    texts = [text(client, name) for name in ("first", "third", None)]
    assert len({old, *texts}) == 4
    assert begun + "".join(delta.text for delta in stream) == right


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"rank": 17}, "adapter 'bad': .* has rank 17 for .* but option max_lora_rank is 16"),
        ({"hidden": 60}, r"adapter 'bad': .*lora_B.weight of shape \[60, 2\] but it must be"),
    ],
)
def test_a_bad_adapter_fails_the_load_by_name_and_the_old_ones_serve_on(
    server: TritonServer,
    client: Client,
    list_adapters: List,
    save: Callable[..., Path],
    post: Post,
    faults: dict[str, int],
    message: str,
) -> None:
    list_adapters({"only": save(5)})
    assert post(server, LOAD, {}) == LOADED
    right = text(client, "only")
    list_adapters({"only": save(5), "bad": save(6, **faults)})
    status, answer = post(server, LOAD, {})
    assert status == 400
    assert re.search(message, answer)
    assert text(client, "only") == right
