"""Time paged attention against torch's own attention, gathered or on contiguous tensors.

    python benchmarks/attention.py [--runs 100] [--layers 8] [--block-size 16] [--all-backends]

Prints microseconds a layer, best and median of the runs, for shapes of SmolLM2-135M in bfloat16,
and how many times as long as the backend that serves here each takes. All take turns in one run, so
that on a busy machine the ratios still tell something. With several layers the cache is read from
main memory, as in a model; with one it stays warm.

Decoding is measured against gathering the cache's blocks and calling torch's attention, once with
its `enable_gqa` and once with the query heads that share keys folded into query rows, which it
computes faster. Prefill is measured against torch's attention on contiguous tensors, which costs no
gathering: with `enable_gqa`, and with keys and values repeated for each query head.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels import (
    AttentionBackend,
    AttentionMetadata,
    KVCacheShape,
    make_attention_backend,
)
from octavo_kernels.folded_attention import make_folded_attention
from octavo_kernels.numba_attention import make_numba_attention
from octavo_kernels.reference_attention import ReferenceAttention

Q_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
GROUP = Q_HEADS // KV_HEADS
SCALE = HEAD_DIM**-0.5
CASES = {  # name: sequences, tokens in each, query rows of each
    "decode 32 x 200": (32, 200, 1),
    "decode 32 x 1000": (32, 1000, 1),
    "decode 1 x 200": (1, 200, 1),
    "prefill 512": (1, 512, 512),
}
Attend = Callable[[int], torch.Tensor]
"""Attends to the cache of one layer."""


def measure(calls: dict[str, Attend], layers: int, runs: int) -> dict[str, list[float]]:
    """Return the microseconds of each call's runs, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs):
        for name, call in calls.items():
            start = time.perf_counter()
            call(run % layers)
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def make_paged(
    backend: AttentionBackend, seqs: int, context: int, rows: int, layers: int
) -> Attend:
    size = backend.shape.block_size
    blocks = -(-context // size)
    cache = backend.allocate(seqs * blocks)
    tables = torch.randperm(seqs * blocks).view(seqs, blocks).int()
    positions = torch.arange(context)
    slots = (tables[:, positions // size].long() * size + positions % size).flatten()
    for layer in range(layers):
        k, v = torch.randn(2, seqs * context, KV_HEADS, HEAD_DIM).bfloat16()
        backend.write_kv_cache(k, v, cache, layer, slots)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(seqs + 1).int() * rows,
        seq_lens=torch.full((seqs,), context).int(),
        block_tables=tables,
        slot_mapping=torch.full((seqs * rows,), -1),
        max_query_len=rows,
        max_seq_len=context,
    )
    q = torch.randn(seqs * rows, Q_HEADS, HEAD_DIM).bfloat16()
    return lambda layer: backend.paged_attention(q, cache, layer, metadata, scale=SCALE)


def make_gathered(seqs: int, context: int, folded: bool, options: argparse.Namespace) -> Attend:
    """Attend from one row a sequence, with the heads of a group `folded` into query rows or not."""
    size = options.block_size
    blocks = -(-context // size)
    caches = torch.randn(options.layers, 2, seqs * blocks, size, KV_HEADS, HEAD_DIM).bfloat16()
    tables = torch.randperm(seqs * blocks).view(seqs, blocks)
    heads, rows = (KV_HEADS, GROUP) if folded else (Q_HEADS, 1)
    q = torch.randn(seqs, heads, rows, HEAD_DIM).bfloat16()

    def attend(layer: int) -> torch.Tensor:
        k, v = (x[tables].flatten(1, 2)[:, :context].transpose(1, 2) for x in caches[layer])
        return scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=not folded)

    return attend


def make_contiguous(context: int, repeated: bool, options: argparse.Namespace) -> Attend:
    """Attend from all rows of a sequence, with keys `repeated` for each query head or not."""
    heads = Q_HEADS if repeated else KV_HEADS
    k, v = torch.randn(2, options.layers, 1, heads, context, HEAD_DIM).bfloat16()
    q = torch.randn(1, Q_HEADS, context, HEAD_DIM).bfloat16()
    return lambda layer: scaled_dot_product_attention(
        q, k[layer], v[layer], is_causal=True, scale=SCALE, enable_gqa=not repeated
    )


def make_backends(options: argparse.Namespace) -> list[AttentionBackend]:
    """Return the backend that serves here, and with --all-backends the others behind it."""
    cpu = torch.device("cpu")
    shape = KVCacheShape(options.layers, KV_HEADS, HEAD_DIM, options.block_size, torch.bfloat16)
    backends = [make_attention_backend(shape, cpu)]
    if options.all_backends:
        others = make_numba_attention(shape), make_folded_attention(shape)
        backends += [x for x in (*others, ReferenceAttention(shape, cpu)) if x is not None]
    return backends


def make_calls(
    backends: list[AttentionBackend],
    sizes: tuple[int, int, int],
    options: argparse.Namespace,
) -> dict[str, Attend]:
    calls = {x.name: make_paged(x, *sizes, options.layers) for x in backends}
    seqs, context, rows = sizes
    if rows > 1:
        calls["SDPA, enable_gqa"] = make_contiguous(context, False, options)
        calls["SDPA, repeated heads"] = make_contiguous(context, True, options)
    else:
        calls["gather + SDPA, enable_gqa"] = make_gathered(seqs, context, False, options)
        calls["gather + SDPA, folded"] = make_gathered(seqs, context, True, options)
    return calls


def count(text: str) -> int:
    """Return a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=count, default=100)
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--block-size", type=count, default=16)
    parser.add_argument("--all-backends", action="store_true")
    options = parser.parse_args()
    backends = make_backends(options)
    print(f"{torch.get_num_threads()} threads, {options.layers} layers of cache")
    print(f"{'us a layer':44} {'best':>8} {'ratio':>6} {'median':>8} {'ratio':>6}")
    for case, sizes in CASES.items():
        times = measure(make_calls(backends, sizes, options), options.layers, options.runs)
        ours = times[backends[0].name]
        for name, theirs in times.items():
            pairs = [(f(theirs), f(theirs) / f(ours)) for f in (min, statistics.median)]
            columns = " ".join(f"{value:8.0f} {ratio:6.2f}" for value, ratio in pairs)
            print(f"{case if theirs is ours else '':18}{name:26} {columns}")


if __name__ == "__main__":
    main()
