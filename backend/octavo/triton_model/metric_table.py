"""Every metric by name: what it means, its kind, its labels, and where its figure is read.

Knows nothing of how or when they are written. docs/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.request import EngineInfo, StepStats

#: Bounds of buckets, from what a GPU reaches at its best to what a CPU takes at its worst.
WAIT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TOKEN_BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
LENGTH_BOUNDS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5) if power < 5 or digit < 5
)
STEP_TOKEN_BOUNDS = tuple(float(2**power) for power in range(15))

Read = Callable[[StepStats, EngineInfo], float]


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """A series whose value is read from what the engine says; those of one name are one family."""

    name: str
    meaning: str
    read: Read
    label: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram."""

    name: str
    meaning: str
    bounds: tuple[float, ...]


def _usage(stats: StepStats) -> float:
    return 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


ENGINE_UP = ("octavo_engine_up", "1 while the engine runs, 0 while it is dead or starting")
_REQUESTS = ("nv_trt_llm_request_metrics", "Requests, by the names of TensorRT-LLM")
_BLOCKS = ("nv_trt_llm_kv_cache_block_metrics", "KV blocks, by the names of TensorRT-LLM")
GAUGES = (
    EngineFigure(
        "octavo_num_requests_running",
        "Requests of which a sequence runs",
        lambda stats, _: stats.num_running,
    ),
    EngineFigure(
        "octavo_num_requests_waiting",
        "Requests of which a sequence is in the queue",
        lambda stats, _: stats.num_waiting,
    ),
    EngineFigure(
        "octavo_num_requests_swapped",
        "Requests of which a sequence has its KV in host memory or on its way back",
        lambda stats, _: stats.num_swapped,
    ),
    EngineFigure(
        "octavo_kv_cache_usage_ratio",
        "Share of the KV blocks that sequences own, from 0 to 1",
        lambda stats, _: _usage(stats),
    ),
    EngineFigure(
        "octavo_kv_blocks_total", "KV blocks of the engine", lambda stats, _: stats.num_blocks
    ),
    EngineFigure(
        "octavo_kv_blocks_used",
        "KV blocks that sequences own",
        lambda stats, _: stats.num_blocks - stats.num_free_blocks,
    ),
    EngineFigure(
        "octavo_kv_blocks_cached",
        "Free KV blocks whose content may still be reused",
        lambda stats, _: stats.num_cached_blocks,
    ),
    EngineFigure(
        "octavo_cpu_kv_blocks_total",
        "Host blocks, which make up the swap space",
        lambda stats, _: stats.num_host_blocks,
    ),
    EngineFigure(
        "octavo_cpu_kv_blocks_used",
        "Host blocks (swap space) that swapped sequences own",
        lambda stats, _: stats.num_used_host_blocks,
    ),
    EngineFigure(
        "octavo_cpu_kv_blocks_cached",
        "Other host blocks (swap space) whose content may still be reused",
        lambda stats, _: stats.num_cached_host_blocks,
    ),
    EngineFigure(
        "octavo_lora_adapters_resident",
        "Adapters (LoRA) in memory",
        lambda stats, _: stats.num_resident_adapters,
    ),
    EngineFigure(*_REQUESTS, lambda stats, _: stats.num_waiting, ("request_type", "waiting")),
    EngineFigure(*_REQUESTS, lambda stats, _: stats.num_context, ("request_type", "context")),
    EngineFigure(*_REQUESTS, lambda stats, _: stats.num_running, ("request_type", "scheduled")),
    EngineFigure(*_REQUESTS, lambda _, info: info.max_num_seqs, ("request_type", "max")),
    EngineFigure(
        *_REQUESTS,
        lambda stats, _: stats.num_running + stats.num_waiting,
        ("request_type", "active"),
    ),
    EngineFigure(*_BLOCKS, lambda stats, _: _usage(stats), ("kv_cache_block_type", "fraction")),
    EngineFigure(*_BLOCKS, lambda _, info: info.block_size, ("kv_cache_block_type", "tokens_per")),
    EngineFigure(
        *_BLOCKS,
        lambda stats, _: stats.num_blocks - stats.num_free_blocks,
        ("kv_cache_block_type", "used"),
    ),
    EngineFigure(*_BLOCKS, lambda stats, _: stats.num_free_blocks, ("kv_cache_block_type", "free")),
    EngineFigure(*_BLOCKS, lambda stats, _: stats.num_blocks, ("kv_cache_block_type", "max")),
)

_LORA_LOADS = (
    "octavo_lora_adapter_loads_total",
    "Adapters (LoRA) that were read, or could not be, because a request wanted them",
)
_PREEMPTIONS = ("octavo_preemptions_total", "Times that a sequence had to make room")
REJECTIONS = (
    "octavo_admission_rejections_total",
    "Requests turned away before they ran: wrong ones, too many, or no engine to take them",
)
ENGINE_TOTALS = (
    EngineFigure(
        "octavo_engine_steps_total", "Steps that computed something", lambda stats, _: stats.step
    ),
    EngineFigure(
        "octavo_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache",
        lambda stats, _: stats.num_prefix_query_tokens_total,
    ),
    EngineFigure(
        "octavo_prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache",
        lambda stats, _: stats.num_prefix_hit_tokens_total,
    ),
    EngineFigure(
        *_LORA_LOADS, lambda stats, _: stats.num_adapter_loads_total, ("result", "loaded")
    ),
    EngineFigure(
        *_LORA_LOADS, lambda stats, _: stats.num_failed_adapter_loads_total, ("result", "failed")
    ),
    EngineFigure(
        "octavo_lora_wait_seconds_total",
        "Seconds that requests waited for their adapters (LoRA), of all together",
        lambda stats, _: stats.adapter_wait_s_total,
    ),
    EngineFigure(
        *_PREEMPTIONS, lambda stats, _: stats.num_swap_preemptions_total, ("kind", "swap")
    ),
    EngineFigure(
        *_PREEMPTIONS,
        lambda stats, _: stats.num_preemptions_total - stats.num_swap_preemptions_total,
        ("kind", "recompute"),
    ),
    EngineFigure(
        *REJECTIONS,
        lambda stats, _: stats.num_requests_refused_total,
        ("reason", "max_num_queued_requests"),
    ),
    EngineFigure(
        *REJECTIONS,
        lambda stats, _: stats.num_tokens_refused_total,
        ("reason", "max_num_queued_tokens"),
    ),
)

PROMPT_TOKENS = (
    "octavo_prompt_tokens_total",
    "Prompt tokens, counted when the first token of the answer comes",
)
GENERATION_TOKENS = ("octavo_generation_tokens_total", "Tokens of answers, counted as they come")
REQUESTS = (
    "octavo_requests_total",
    "Requests that got their final answer; of several answers, the first tells how",
)
RESTARTS = ("octavo_engine_restarts_total", "Times that an engine was ready again after one died")

TIME_TO_FIRST_TOKEN = Distribution(
    "octavo_time_to_first_token_seconds",
    "From the arrival of a request until the first token of any of its answers",
    WAIT_BOUNDS_S,
)
INTER_TOKEN_LATENCY = Distribution(
    "octavo_inter_token_latency_seconds", "Between two tokens of one answer", TOKEN_BOUNDS_S
)
E2E_LATENCY = Distribution(
    "octavo_e2e_request_latency_seconds",
    "From arrival until the last response was sent, of requests that did not end in an error",
    WAIT_BOUNDS_S,
)
QUEUE_TIME = Distribution(
    "octavo_request_queue_time_seconds",
    "From arrival until first scheduled, of requests that ended as stop, length or deadline",
    WAIT_BOUNDS_S,
)
NUM_PROMPT_TOKENS = Distribution(
    "octavo_request_prompt_tokens",
    "Prompt tokens of a request that did not end in an error",
    LENGTH_BOUNDS,
)
NUM_GENERATION_TOKENS = Distribution(
    "octavo_request_generation_tokens",
    "Tokens of all answers of a request that did not end in an error",
    LENGTH_BOUNDS,
)
ITERATION_TOKENS = Distribution(
    "octavo_iteration_tokens", "Tokens that a step computed", STEP_TOKEN_BOUNDS
)
STEP_DURATION = Distribution(
    "octavo_step_duration_seconds", "Time that a step took", TOKEN_BOUNDS_S
)
