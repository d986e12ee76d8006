"""Real servers for the end-to-end tests: the demo model, a tiny one, or whatever a test needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.local.demo_model import demo_checkpoint
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

StartServer = Callable[..., TritonServer]
FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
LOAD_TIMEOUT_S = 120.0


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama of two layers with the demo model's tokenizer: it loads in no time."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in demo_checkpoint().glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _started(options: dict[str, Any]) -> TritonServer:
    server = TritonServer(ServerOptions(**{**FREE_PORTS, "device": "cpu", **options}))
    server.start()
    try:
        server.wait_ready(LOAD_TIMEOUT_S)
    except BaseException:
        server.kill()
        raise
    return server


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Return a function that starts a server with `ServerOptions`, ready and on free ports.

    The servers are killed after the test.
    """
    servers: list[TritonServer] = []

    def start(**options: Any) -> TritonServer:
        servers.append(_started(options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def demo_server() -> Iterator[TritonServer]:
    """Return a server of the demo model that all tests share; leave it as you found it."""
    server = _started({"model": "demo"})
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """Return a server of the tiny model that all tests share; leave it as you found it."""
    server = _started({"model": str(tiny_checkpoint)})
    yield server
    server.kill()
