"""Tiny random checkpoints of each way of being served, and a hub that has one of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 106,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "mistral": {"sliding_window": 40},
    "mixtral": {"num_local_experts": 5},
    "gpt2": {"n_embd": 60, "n_head": 6, "n_layer": 3, "n_positions": 128},
    "starcoder2": {"sliding_window": 30},
    "mamba": {"state_size": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the checkpoint of a model_type, made once."""
    root = tmp_path_factory.mktemp("checked")

    def make(model_type: str) -> Path:
        folder = root / model_type
        if not folder.exists():
            config = AutoConfig.for_model(model_type, **{**SIZES, **MODELS[model_type]})
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation="eager"
            )
            model.save_pretrained(folder)
        return folder

    return make


class Hub(BaseHTTPRequestHandler):
    """Answers as a hub that has one model; `asked` has the files that were asked for."""

    directory: Path
    asked: list[str]
    commit = "0" * 40

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if "/resolve/" in path:
            self.asked.append(path.rpartition("/")[2])
        if path.startswith("/api/models/someone/tiny"):
            sizes = {file.name: file.stat().st_size for file in self.directory.iterdir()}
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            body: Any = {"id": "someone/tiny", "sha": self.commit, "siblings": files}
            if "/tree/" in path:
                kind = {"type": "file", "oid": self.commit}
                body = [{**kind, "path": name, "size": size} for name, size in sizes.items()]
            self._send(200, json.dumps(body).encode(), with_body)
            return
        name = path.rpartition("/")[2]
        file = self.directory / name
        if "/resolve/" not in path or not file.exists():
            self._send(404, b"", with_body)
        else:
            self._send(200, file.read_bytes(), with_body)

    def _send(self, status: int, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{len(body)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Hub]]:
    """Run a hub that has `someone/tiny`, and let the hub's client ask it."""
    handler = type("TinyHub", (Hub,), {"directory": checkpoint("qwen2"), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    constants = "huggingface_hub.constants"
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    monkeypatch.setattr(
        f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()
