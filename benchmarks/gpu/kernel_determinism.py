"""The part `determinism`, first half: a row's bits are its own, whatever is computed beside it.

Knows nothing of models or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from gpu.context import Context
from gpu.expert_operations import expert_operations
from gpu.logit_operations import logit_operations
from gpu.quantized_operations import quantized_operations
from gpu.report import Line, Section, Verdict
from gpu.row_operations import RowOperation, Tensors, results_of, row_operations
from gpu.sequences import BackendMaker, Sequences, Share, draw_sequences
from octavo_kernels import AttentionBackend, KVCacheShape, apply_rope, make_attention_backend
from octavo_kernels._attention_launch import choose_attention
from octavo_kernels._choice import gpu_capability

_ROWS = 37
_LENGTHS = (1300, 515, 1, 40)
_WHOLE = [Share(index, length, length) for index, length in enumerate(_LENGTHS)]

Case = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What was computed, and what must have the same bits."""


def kernel_determinism(context: Context) -> list[Section]:
    """Compare results of the same rows, computed in different ways, to the bit."""
    torch.manual_seed(2)
    counts: dict[str, list[int]] = {}
    for axis, (actual, expected) in _cases(context):
        found = counts.setdefault(axis, [0, 0])
        for a, b in zip(actual, expected, strict=True):
            found[0] += 1
            found[1] += not _same_bits(a, b)
    lines = tuple(
        Line((axis, str(cases), str(differing)), Verdict.of(differing == 0))
        for axis, (cases, differing) in counts.items()
    )
    heads = ("axis", "cases", "cases that differ")
    return [Section("Kernels: the same bits", heads, lines)]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _cases(context: Context) -> Iterator[tuple[str, Case]]:
    operations = [*row_operations(), *logit_operations(), *expert_operations()]
    for operation in (*operations, *quantized_operations(context.device)):
        for dtype in context.dtypes_of(operation.dtypes):
            yield from _row_cases(operation, dtype, context.device)
    for dtype in context.dtypes:
        yield "rotation and the cache's write, fused or apart", _fused_case(dtype, context.device)
        for options in ({}, {"window": 100, "soft_cap": 20.0, "sinks": torch.randn(8)}):
            sequences = draw_sequences(
                _LENGTHS, (2, 4, 64), dtype, context.device, make_attention_backend, **options
            )
            whole = sequences.attend(_WHOLE)
            for axis, case in _attention_cases(sequences, whole):
                yield f"paged_attention: {axis}", case
            if context.is_gpu:
                yield from _split_cases(sequences, whole, context.device)


def _row_cases(
    operation: RowOperation, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Case]]:
    """Yield the axes of an operation that works row by row."""
    drawn, drawn_shared = operation.draw(_ROWS, dtype)
    rows, shared = (tuple(x.to(device) for x in group) for group in (drawn, drawn_shared))

    def compute(picked: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        # Operations may work in place: each is given rows of its own.
        return results_of(operation.compute, tuple(picked(x).clone() for x in rows), shared)

    batch = compute(lambda x: x)
    for index in (0, 17, _ROWS - 1):
        alone = compute(lambda x, i=index: x[i : i + 1])  # type: ignore[misc]
        yield "rows: alone or in a batch", (list(alone), [x[index : index + 1] for x in batch])
    backwards = compute(lambda x: x.flip(0))
    yield "rows: their order", ([x.flip(0) for x in backwards], list(batch))
    yield "rows: repeated runs", (list(compute(lambda x: x)), list(batch))


def _fused_case(dtype: torch.dtype, device: torch.device) -> Case:
    """Return rotated queries and a cache as one call makes them, and as two do."""
    shape = KVCacheShape(1, 2, 64, 16, dtype)
    backend = make_attention_backend(shape, device)
    caches = [backend.allocate(4), backend.allocate(4)]
    q, k, v = (torch.randn(_ROWS, heads, 64, device=device).to(dtype) for heads in (8, 2, 2))
    positions, slots = (torch.arange(_ROWS, device=device) + offset for offset in (100, 9))
    cos_sin = torch.randn(200, 64, device=device)
    fused = backend.rope_and_write_kv_cache(q, k, v, positions, cos_sin, caches[0], 0, slots)
    turned, keys = apply_rope(q, k, positions, cos_sin)
    backend.write_kv_cache(keys, v, caches[1], 0, slots)
    return [fused, caches[0].storage], [turned, caches[1].storage]


def _attention_cases(sequences: Sequences, whole: list[torch.Tensor]) -> Iterator[tuple[str, Case]]:
    """Yield the axes of attention, each beside one step that computes all rows."""
    for share in _WHOLE:
        yield "a sequence alone or in a batch", (sequences.attend([share]), [whole[share.sequence]])
    chunks = [(0, 0, 7), (0, 5, 512), (0, 500, 530), (0, 512, 1300), (1, 100, 515)]
    decodes = [(0, end - 1, end) for end in (1, 511, 512, 513, 1024, 1025, 1300)]
    for axis, ranges in (("chunks of a prompt", chunks), ("decode or prefill", decodes)):
        for index, begin, end in ranges:
            out = sequences.attend([Share(index, end, end - begin)])
            yield axis, (out, [whole[index][begin:end]])
    mixed = [Share(1, 515, 1), Share(0, 700, 200), Share(3, 40, 3), Share(0, 900, 1)]
    expected = [whole[x.sequence][x.length - x.rows : x.length] for x in mixed]
    yield "chunks and decodes in one step", (sequences.attend(mixed), expected)
    for block_size in (8, 32, 256):
        other = replace(sequences, block_size=block_size)
        yield "block size", (other.attend(_WHOLE), whole)
    graphs = replace(sequences, launched_for=8192)
    yield "launched for a longer context, as graphs are", (graphs.attend(_WHOLE), whole)
    yield "repeated runs", (sequences.attend(_WHOLE), whole)


def _split_cases(
    sequences: Sequences, whole: list[torch.Tensor], device: torch.device
) -> Iterator[tuple[str, Case]]:
    """Yield results with splits merged in registers, and through memory by few and many lanes."""
    axis = "paged_attention: splits in registers or through memory"
    for num_processors in (1, 20, 100_000):
        other = replace(sequences, make_backend=_backend_with(num_processors))
        yield axis, (other.attend(_WHOLE), whole)
        decode = [Share(0, 1300, 1), Share(1, 515, 1)]
        yield axis, (other.attend(decode), [whole[0][-1:], whole[1][-1:]])


def _backend_with(num_processors: int) -> BackendMaker:
    # Here, for the rest of this module works without the Triton language.
    from octavo_kernels.triton_attention import TritonAttention

    def make(shape: KVCacheShape, device: torch.device) -> AttentionBackend:
        capability = gpu_capability(torch.empty(0, device=device))
        assert capability is not None
        config = choose_attention(shape.head_dim, shape.dtype.itemsize, capability)
        return TritonAttention(shape, device, config, num_processors)

    return make
