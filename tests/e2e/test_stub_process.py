"""What the process beside the engine does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

FindProcess = Callable[[TritonServer, str], psutil.Process]


def test_the_stub_reads_and_writes_text_without_torch(
    tiny_server: TritonServer, find_process: FindProcess
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        asked = {"max_tokens": 4, "ignore_eos": True, "logprobs": 1}
        assert client.generate("one two", **asked).num_output_tokens == 4
        messages = [{"role": "user", "content": "hi"}]
        assert client.generate(messages=messages, **asked).num_output_tokens == 4
    libraries = {
        word: Path(f"/proc/{find_process(tiny_server, word).pid}/maps").read_text()
        for word in ("backend_stub", "octavo.engine_process")
    }
    assert "libtorch" in libraries["octavo.engine_process"]
    assert "libtorch" not in libraries["backend_stub"]
