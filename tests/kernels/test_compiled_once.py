"""Steps of other sizes launch the same machine code: none is compiled anew while requests wait.

The language compiles a kernel for kinds of arguments: for an integer whether it is 1, a multiple of
16 or another, unless the kernel says not to; for a tensor its type, and whether it is aligned.
"""

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

import octavo_kernels
from octavo_kernels import AttentionMetadata, KVCacheShape

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the Triton language is not installed"
    ),
]

TOKENS = (1, 2, 7, 16, 33, 64, 513)
HIDDEN, HEADS, HEAD_DIM = 1024, 16, 64


def zeros(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def attend(num_tokens: int) -> None:
    from octavo_kernels._attention_launch import choose_attention
    from octavo_kernels.triton_attention import TritonAttention

    shape = KVCacheShape(2, HEADS // 2, HEAD_DIM, 16, torch.bfloat16)
    config = choose_attention(HEAD_DIM, 2, 90)
    backend = TritonAttention(shape, torch.device("cpu"), config, num_processors=132)
    cache = backend.allocate(3)
    rows = zeros(num_tokens, 2 * HEADS, HEAD_DIM)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    q, k, v = rows.split([HEADS, HEADS // 2, HEADS // 2], dim=1)
    backend.write_kv_cache(k, v, cache, 1, slots)
    backend.rope_and_write_kv_cache(q, k, v, slots, torch.ones(1024, HEAD_DIM), cache, 1, slots)
    for num_seqs in {1, num_tokens}:
        starts, lens = (torch.zeros(num_seqs + i, dtype=torch.int32) for i in (1, 0))
        tables = torch.zeros(num_seqs, num_tokens, dtype=torch.int32)
        metadata = AttentionMetadata(starts, lens, tables, slots, num_tokens, 600 + num_tokens)
        backend.paged_attention(zeros(num_tokens, HEADS, HEAD_DIM), cache, 1, metadata, scale=1.0)


OPERATIONS: dict[str, Callable[[int], object]] = {
    "rms_norm": lambda n: octavo_kernels.rms_norm(zeros(n, HIDDEN), ones(HIDDEN), 1e-5),
    "rms_norm of heads": lambda n: octavo_kernels.rms_norm(
        zeros(n, 24, HEAD_DIM)[:, :HEADS], ones(HEAD_DIM), 1e-5
    ),
    "add_rms_norm": lambda n: octavo_kernels.add_rms_norm(
        zeros(n, HIDDEN), zeros(n, HIDDEN), ones(HIDDEN), 1e-5
    ),
    "layer_norm": lambda n: octavo_kernels.layer_norm(
        zeros(n, HIDDEN), ones(HIDDEN), ones(HIDDEN), 1e-5
    ),
    "apply_rope": lambda n: octavo_kernels.apply_rope(
        *zeros(n, 24, HEAD_DIM).split([HEADS, 8], dim=1), torch.arange(n), torch.ones(1024, 64)
    ),
    "silu_and_mul": lambda n: octavo_kernels.silu_and_mul(zeros(n, 2 * HIDDEN)),
    "linear": lambda n: octavo_kernels.linear(zeros(n, HIDDEN), zeros(1536, HIDDEN), zeros(1536)),
    "grouped_linear": lambda n: octavo_kernels.grouped_linear(
        zeros(n, HIDDEN), zeros(3, 1536, HIDDEN), torch.zeros(4, dtype=torch.int64)
    ),
    "linear of 8 bits": lambda n: octavo_kernels.linear(
        zeros(n, HIDDEN), zeros(1536, HIDDEN).char(), scales=torch.ones(1536)
    ),
    "weighted_sum": lambda n: octavo_kernels.weighted_sum(
        zeros(2 * n, HIDDEN), torch.arange(2 * n).view(n, 2), torch.ones(n, 2)
    ),
    "attention": attend,
}


def kind(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        bits = 32 if -(2**31) <= argument < 2**31 else 64
        return bits, argument == 1, argument % 16 == 0
    return type(argument)


@pytest.fixture
def launches(monkeypatch) -> dict[tuple, set[tuple]]:
    """Note the kinds of what kernels are launched with, by kernel and constants; launch none."""
    from triton.runtime.jit import JITFunction

    seen: dict[tuple, set[tuple]] = defaultdict(set)

    def note(kernel: JITFunction, *arguments: object, grid, warmup, **constants: object) -> None:
        fixed = [
            kind(argument)
            for name, argument in zip(kernel.arg_names, arguments, strict=False)
            if name not in kernel.do_not_specialize
        ]
        seen[kernel.__name__, *sorted(constants.items())].add(tuple(fixed))

    monkeypatch.setattr(JITFunction, "run", note)
    for module in (
        "rms_norm",
        "layer_norm",
        "apply_rope",
        "_gated",
        "linear",
        "grouped_linear",
        "weighted_sum",
    ):
        chosen = importlib.import_module(f"octavo_kernels.{module}")
        monkeypatch.setattr(chosen, "gpu_capability", lambda tensor: 90)
    return seen


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_number_of_tokens_runs_what_was_compiled_for_another(operation, launches):
    for num_tokens in TOKENS:
        OPERATIONS[operation](num_tokens)
    assert launches
    assert {launch: kinds for launch, kinds in launches.items() if len(kinds) > 1} == {}
