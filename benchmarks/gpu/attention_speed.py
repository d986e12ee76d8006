"""The part `attention`: decode against memory's bandwidth, prefill against products and SDPA.

Bytes and operations are counted, ceilings are measured in the same run, and every measurement
begins with a cold L2 cache.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.ceilings import copy_bytes_per_s, product_flops_per_s
from gpu.context import Context
from gpu.paged_batch import StepShape, make_step
from gpu.report import Line, Section, Verdict, unmeasured_line
from gpu.timing import time_work
from octavo_kernels import make_attention_backend

_DECODE_TARGET = 0.85  # of a copy's bandwidth, at this context and batch
_TARGET_CONTEXT, _TARGET_BATCH = 4096, 32
_PREFILL_TARGET = 0.65  # of FlashAttention's speed
_DECODE_HEADS = ("context", "batch", "query heads a KV head", "µs", "GB/s", "of a copy")
_RATES = ("µs", "TFLOP/s", "of a product", "SDPA, µs", "of SDPA's speed")
_PREFILL_HEADS = ("batch", "tokens", *_RATES)


def attention(context: Context) -> list[Section]:
    """Measure decode and prefill."""
    torch.manual_seed(5)
    return [_prefill(context), _decode(context)]


def _decode(context: Context) -> Section:
    ceiling = copy_bytes_per_s(context.device)
    contexts, batches, groups = [1024, 4096, 16384], [1, 32, 128], [1, 4, 8]
    if not context.is_gpu:
        contexts, batches, groups = [32], [1, 2], [1, 4]
    elif context.quick:
        contexts = [_TARGET_CONTEXT]
    # What has a target comes first, should time run out.
    cases = sorted(
        itertools.product(contexts, batches, groups),
        key=lambda case: (case[0] != _TARGET_CONTEXT, case[1] != _TARGET_BATCH, *case),
    )
    lines = tuple(
        unmeasured_line((f"{case[0]:,}", *map(str, case[1:])), _DECODE_HEADS)
        if context.is_late
        else _decode_line(*case, ceiling, context)
        for case in cases
    )
    notes = (
        f"A copy moves {ceiling / 1e9:,.0f} GB/s, read and written. Target: {_DECODE_TARGET:.0%} "
        f"of it at context {_TARGET_CONTEXT:,} and batch {_TARGET_BATCH}. bfloat16, 8 KV heads of "
        "128, blocks of 16 in random order.",
    )
    return Section("Decode attention", _DECODE_HEADS, lines, notes, is_speed=True)


def _decode_line(length: int, batch: int, group: int, ceiling: float, context: Context) -> Line:
    shape = StepShape(num_seqs=batch, context=length, group=group)
    seconds = _time_step(shape, context)
    rate = shape.moved_bytes / seconds
    has_target = (length, batch) == (_TARGET_CONTEXT, _TARGET_BATCH)
    verdict = Verdict.of(rate >= _DECODE_TARGET * ceiling) if has_target else Verdict.NONE
    figures = (f"{seconds * 1e6:.1f}", f"{rate / 1e9:,.0f}", f"{rate / ceiling:.0%}")
    return Line((f"{length:,}", str(batch), str(group), *figures), verdict)


def _prefill(context: Context) -> Section:
    ceiling = product_flops_per_s(context.device)
    cases = ((1, 2048), (4, 2048), (1, 8192), (1, 16384)) if context.is_gpu else ((1, 32),)
    lines = tuple(
        unmeasured_line((str(batch), f"{length:,}"), _PREFILL_HEADS)
        if context.is_late
        else _prefill_line(batch, length, ceiling, context)
        for batch, length in cases
    )
    notes = (
        f"A large bfloat16 product by torch runs at {ceiling / 1e12:,.0f} TFLOP/s. Target: "
        f"{_PREFILL_TARGET:.0%} of the speed of torch's FlashAttention on contiguous tensors. "
        "Whole causal prompts, 32 query heads and 8 KV heads of 128.",
    )
    return Section("Prefill attention", _PREFILL_HEADS, lines, notes, is_speed=True)


def _prefill_line(batch: int, length: int, ceiling: float, context: Context) -> Line:
    shape = StepShape(num_seqs=batch, context=length, rows=length)
    seconds, flash_s = _time_step(shape, context), _time_flash(shape, context)
    rate = shape.causal_flops / seconds
    figures = (
        f"{seconds * 1e6:,.0f}",
        f"{rate / 1e12:,.0f}",
        f"{rate / ceiling:.0%}",
        f"{flash_s * 1e6:,.0f}",
        f"{flash_s / seconds:.0%}",
    )
    holds = flash_s / seconds >= _PREFILL_TARGET
    verdict = Verdict.of(holds) if context.is_gpu else Verdict.NONE
    return Line((str(batch), f"{length:,}", *figures), verdict)


def _time_step(shape: StepShape, context: Context) -> float:
    backend = make_attention_backend(shape.cache_shape, context.device)
    step = make_step(shape, context.device, backend)
    return time_work(lambda: step.attend(backend), context.device)


def _time_flash(shape: StepShape, context: Context) -> float:
    """Time FlashAttention on keys and values that are spread over all query heads beforehand."""
    sizes = (3, shape.num_seqs, shape.kv_heads * shape.group, shape.context, shape.head_dim)
    q, k, v = torch.randn(sizes, device=context.device).to(shape.dtype)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not context.is_gpu:
        return time_work(attend, context.device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return time_work(attend, context.device)
