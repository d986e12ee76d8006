"""Engine options: one frozen, documented, validated object, read from three places in order.

`1/engine.json`, then the `parameters` of config.pbtxt, then `OCTAVO_…` environment variables; a
later one wins. Every field's string below is its documentation; the README's table is made of them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.device_numbers import read_device_numbers
from octavo.errors import ConfigError, shown
from octavo.tenant_weights import read_tenant_weights

ENVIRONMENT_PREFIX = "OCTAVO_"

SCHEDULING_POLICIES = ("fcfs", "priority", "fair")

_CHOICES = {
    "model_impl": ("auto", "native", "transformers", "static"),
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "quantization": ("none", "int8", "fp8"),
    "preemption_mode": ("auto", "swap", "recompute"),
    "scheduling_policy": SCHEDULING_POLICIES,
}

#: Integers that may be 0. `max_num_queued_tokens` may not: one request may always wait alone, so 0
#: would not be what it says.
MAY_BE_ZERO = frozenset({"swap_space_bytes", "max_num_queued_requests", "max_logprobs"})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine; numbers and booleans may be given as strings.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    model: str
    """Checkpoint directory (safetensors), GGUF file, hub id, or `demo`."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; by default the model's own."""
    trust_remote_code: bool = False
    """Run Python that the checkpoint or its hub repository brings, for tokenizer and model."""
    allow_pickle: bool = False
    """Load pickled weights (.bin, .pt, .pth) of tensors only, where there are no safetensors."""
    model_impl: str = "auto"
    """`native`, `transformers` (paged too), `static` (whole batches), or `auto`: the first able."""
    load_format: str = "auto"
    """`auto`, the weights that are there, or `dummy`: drawn at random, to measure speed alone."""
    dtype: str = "auto"
    """`auto` (the checkpoint's), `bfloat16`, `float16` or `float32`."""
    quantization: str = "none"
    """`none`, `int8` or, on GPUs of 8.9 or later, `fp8`: linear weights of 8 bits, less exact."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    devices: str | None = None
    """Numbers of the ranks' CUDA devices, such as `0,1`; by default the first that are visible."""
    deterministic: bool = True
    """A request's neighbours change no token of it; false: on a GPU they may, for more speed."""
    block_size: int = 16
    """Tokens in one KV block: a power of two from 8 to 256."""
    num_kv_blocks: int | None = None
    """Number of KV blocks; by default as many as the memory options allow."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU memory left after weights and a profiling run that KV blocks may take."""
    kv_cache_memory_bytes: int | None = None
    """Memory in bytes for a rank's KV blocks; absent on CPU: a quarter of the free, up to 4 GiB."""
    swap_space_bytes: int | None = None
    """Host bytes for a rank's KV; absent: 10 % of the free, up to 4 GiB; 0 on CPU unless `swap`."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts and answers that begin alike."""
    preemption_mode: str = "auto"
    """How sequences make room: `swap` to host memory, `recompute` later, or `auto`, the cheaper."""
    scheduling_policy: str = "fcfs"
    """Who runs first: `fcfs`, `priority` (lower first), or `fair` (equal service to tenants)."""
    tenant_weights: str = ""
    """Shares of service under `fair`, such as `gold=4,free=0.5`; a tenant not named has 1."""
    max_num_queued_requests: int | None = None
    """Requests that may wait, 0 for none; more are refused at once. Absent: no limit."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens that may wait, beside one request alone; more are refused. Absent: no limit."""
    max_num_seqs: int = 64
    """Sequences that run in one step at most."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, shared by prefill chunks and decodes."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; by default the model's own context."""
    enable_lora: bool = False
    """Serve LoRA adapters, those of `multi_lora`, to requests that name one (`lora_name`)."""
    multi_lora: str | None = None
    """JSON file of directories by adapter; by default `multi_lora.json` beside `engine.json`."""
    max_loras: int | None = None
    """Adapters in memory at once; others are read when a request wants them. Absent: all."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    default_max_tokens: int = 512
    """Output limit of requests that name none, in tokens."""
    max_prompt_bytes: int = 8_388_608
    """Longest prompt as it is sent, in bytes of text, of JSON messages, or of 4-byte ids."""
    max_logprobs: int = 20
    """Most likely tokens of which a request may ask the log-probability, from 0 to 1024."""
    engine_process: bool = True
    """Run the engine in a process of its own; false runs it in a thread of the caller's."""
    cpu_threads: int | None = None
    """Threads of the CPU kernels of all ranks; by default the physical cores it may use."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer; each holds some of its heads and columns."""
    pipeline_parallel_size: int = 1
    """Stages that share the layers, each of so many ranks; as many steps compute at once."""
    distributed_executor_backend: str = "mp"
    """Who starts the ranks beside the first: `mp`, this machine, or `ray`, on a cluster's nodes."""
    ray_address: str = "auto"
    """HOST:PORT of a Ray cluster that this machine is a node of; `auto`: the one it runs."""
    allow_inspect: bool = False
    """Answer `octavo inspect`, which shows the engine's sequences and blocks to any client."""
    drain_timeout_s: float = 10.0
    """Seconds running requests get to finish when the model is unloaded."""
    step_timeout_s: float = 120.0
    """An engine process silent for so many seconds while requests wait is killed and restarted."""
    log_format: str = "text"
    """Lines of the log: `text`, or `json` with one object a line."""
    log_requests: bool = True
    """Log one line a request: its end, tokens and times, never its text."""
    otlp_endpoint: str | None = None
    """URL that spans of requests are sent to, such as `http://localhost:4318/v1/traces`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _read(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self._check("model", bool(self.model), "a checkpoint path, a hub id or 'demo'")
        for name, choices in _CHOICES.items():
            self._check(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        device_ok = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device) is not None
        self._check("device", device_ok, "auto, cpu, cuda or cuda:N")
        size = self.block_size
        self._check(
            "block_size",
            8 <= size <= 256 and size & (size - 1) == 0,
            "a power of two from 8 to 256",
        )
        share = self.gpu_memory_utilization
        self._check("gpu_memory_utilization", 0.0 < share <= 1.0, "a number in (0, 1]")
        self._check(
            "drain_timeout_s", 0.0 <= self.drain_timeout_s <= 3600.0, "seconds from 0 to 3600"
        )
        timeout_s = self.step_timeout_s
        self._check("step_timeout_s", 1.0 <= timeout_s <= 86_400.0, "seconds from 1 to 86400")
        self._check("max_logprobs", 0 <= self.max_logprobs <= 1024, "an integer from 0 to 1,024")
        self._check_counts()
        self._check_ranks()
        self._check_scheduling()
        self._check_reports()

    @property
    def num_ranks(self) -> int:
        """Processes that compute: those of each pipeline stage, in all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_over_ray(self) -> bool:
        """Whether Ray places ranks."""
        return self.distributed_executor_backend == "ray" and self.num_ranks > 1

    def _check_ranks(self) -> None:
        backend = self.distributed_executor_backend
        self._check("distributed_executor_backend", backend in ("mp", "ray"), "mp or ray")
        is_address = _is_ray_address(self.ray_address)
        self._check("ray_address", is_address, "auto, or HOST:PORT of a cluster that runs")
        names_one = self.device.startswith("cuda:")
        chooser = "Ray chooses" if self.is_over_ray else "option devices names"
        allowed = f"auto, cpu or cuda with {self.num_ranks} ranks; {chooser} theirs"
        self._check("device", self.num_ranks == 1 or not names_one, allowed)
        is_free = self.devices is None or not self.is_over_ray
        self._check("devices", is_free, "absent with Ray, which chooses the GPU of each rank")
        if self.devices is not None:
            is_open = self.device in ("auto", "cuda")
            self._check("devices", is_open, f"absent where device is {self.device}")
            read_device_numbers(self.devices, self.num_ranks)
        is_native = self.model_impl in ("auto", "native")
        self._check(
            "model_impl",
            self.num_ranks == 1 or is_native,
            f"auto or native with {self.num_ranks} ranks",
        )

    def _check_reports(self) -> None:
        self._check("log_format", self.log_format in ("text", "json"), "text or json")
        url = self.otlp_endpoint
        is_url = url is None or re.fullmatch(r"https?://[^\s/]+(/\S*)?", url) is not None
        self._check("otlp_endpoint", is_url, "a URL that begins with http:// or https://")

    def _check_scheduling(self) -> None:
        self._check(
            "preemption_mode",
            self.preemption_mode != "swap" or self.swap_space_bytes != 0,
            "auto or recompute when swap_space_bytes is 0",
        )
        read_tenant_weights(self.tenant_weights)
        self._check(
            "max_num_batched_tokens",
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"at least max_num_seqs ({self.max_num_seqs})",
        )

    def _check_counts(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = 2**63 - 1 if field.name.endswith("_bytes") else 2**31 - 1
            least = 0 if field.name in MAY_BE_ZERO else 1
            if str(field.type).startswith("int") and value is not None:
                allowed = f"an integer from {least} to {limit:,}"
                self._check(field.name, least <= value <= limit, allowed)

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            value = shown(getattr(self, name))
            raise ConfigError(f"option {name} is {value} but must be {allowed}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from options whose values may be typed or strings; unknown names are refused."""
        known = sorted(field.name for field in fields(cls))
        for name in values:
            if name not in known:
                raise ConfigError(_unknown_option(name[:64], known))
        if "model" not in values:
            raise ConfigError(
                "option 'model' is missing; name a checkpoint path, a hub id or 'demo'"
            )
        return cls(**values)

    @classmethod
    def load(
        cls,
        engine_json: Path,
        parameters: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> EngineConfig:
        """Read `engine.json`, overridden by config.pbtxt parameters, then by the environment."""
        try:
            values = json.loads(engine_json.read_bytes()) if engine_json.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{engine_json} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{engine_json} must hold a JSON object of engine options")
        known = {field.name for field in fields(cls)}
        overrides = {name: environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in known}
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls.from_mapping({**values, **parameters, **given})


def _is_ray_address(text: str) -> bool:
    found = re.fullmatch(r"[^\s/\0]+:([0-9]{1,5})", text)
    return text == "auto" or (found is not None and 1 <= int(found[1]) <= 65_535)


def _unknown_option(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown engine option {name!r}{hint} (known: {', '.join(known)})"


def _read(name: str, kind: str, value: Any) -> Any:
    """Turn a JSON value or a string into the field's type."""
    if value is None and kind.endswith("| None"):
        return None
    base = kind.removesuffix(" | None")
    allowed = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
    error = ConfigError(f"option {name} is {shown(value)} but must be {allowed[base]}")
    if base == "bool":
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool):
            return value
        if not isinstance(value, str) or value.lower() not in words:
            raise error
        return words[value.lower()]
    if base == "str":
        if not isinstance(value, str):
            raise error
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise error
    if isinstance(value, str) and not value.isascii():  # int() takes the digits of any script
        raise error
    try:
        if base == "int" and isinstance(value, float) and not value.is_integer():
            raise error
        return int(value) if base == "int" else float(value)
    except (ValueError, OverflowError):
        raise error from None
