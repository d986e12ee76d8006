"""Time paged attention against gathering the cache and calling torch's own attention.

    python benchmarks/attention.py [--runs 200] [--layers 8] [--block-size 16]

Prints microseconds a layer, best and median of the runs, for shapes of SmolLM2-135M in bfloat16.
With several layers the cache is read from main memory, as in a model; with one it stays warm.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from octavo_kernels import AttentionMetadata, KVCacheShape, make_attention_backend

Q_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SCALE = HEAD_DIM**-0.5
CASES = {  # name: sequences, tokens in each, query rows of each
    "decode 32 x 200": (32, 200, 1),
    "decode 32 x 1000": (32, 1000, 1),
    "decode 1 x 200": (1, 200, 1),
    "prefill 512": (1, 512, 512),
}


def measure(call: Callable[[int], object], layers: int, runs: int) -> str:
    times = []
    for run in range(runs):
        start = time.perf_counter()
        call(run % layers)
        times.append((time.perf_counter() - start) * 1e6)
    return f"{min(times):8.0f} {statistics.median(times):8.0f}"


def make_paged(seqs: int, context: int, rows: int, options: argparse.Namespace):
    size = options.block_size
    shape = KVCacheShape(options.layers, KV_HEADS, HEAD_DIM, size, torch.bfloat16)
    backend = make_attention_backend(shape, torch.device("cpu"))
    blocks = -(-context // size)
    cache = backend.allocate(seqs * blocks)
    tables = torch.randperm(seqs * blocks).view(seqs, blocks).int()
    positions = torch.arange(context)
    slots = (tables[:, positions // size].long() * size + positions % size).flatten()
    for layer in range(options.layers):
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


def make_gathered(seqs: int, context: int, rows: int, options: argparse.Namespace):
    size = options.block_size
    blocks = -(-context // size)
    caches = torch.randn(options.layers, 2, seqs * blocks, size, KV_HEADS, HEAD_DIM).bfloat16()
    tables = torch.randperm(seqs * blocks).view(seqs, blocks)
    q = torch.randn(seqs, Q_HEADS, rows, HEAD_DIM).bfloat16()

    def attend(layer: int) -> torch.Tensor:
        k, v = (x[tables].flatten(1, 2)[:, :context].transpose(1, 2) for x in caches[layer])
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=rows > 1, scale=SCALE, enable_gqa=True
        )

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {options.layers} layers of cache, us a layer")
    print(f"{'':18} {'paged: best   median':>18} {'gather: best   median':>24}")
    for name, case in CASES.items():
        paged = measure(make_paged(*case, options), options.layers, options.runs)
        gathered = measure(make_gathered(*case, options), options.layers, options.runs // 10)
        print(f"{name:18} {paged} {gathered:>20}")


if __name__ == "__main__":
    main()
