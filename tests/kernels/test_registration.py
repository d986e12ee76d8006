"""What torch knows of the operations, and what a compiler makes of functions that call them."""

import pytest
import torch

from octavo_kernels import KVCacheShape, add_rms_norm, rms_norm
from octavo_kernels._native.library import native_instructions
from octavo_kernels.native_attention import NativeAttention
from octavo_kernels.reference_attention import ReferenceAttention

pytestmark = pytest.mark.kernels

# name: arguments of the operation, as its public function has checked and allocated them
OPERATIONS = {
    "rms_norm": lambda: (torch.randn(3, 16), torch.randn(16), 1e-5, torch.empty(3, 16)),
    "add_rms_norm": lambda: (
        *torch.randn(2, 3, 16),
        *(torch.randn(16), 1e-5),
        *torch.empty(2, 3, 16),
    ),
    "layer_norm": lambda: (
        *(torch.randn(3, 16), torch.randn(16), torch.randn(16), 1e-5, torch.empty(3, 16)),
    ),
    "silu_and_mul": lambda: (torch.randn(3, 16), torch.empty(3, 8)),
    "gelu_and_mul": lambda: (torch.randn(3, 16), torch.empty(3, 8)),
    "linear": lambda: (
        *(torch.randn(3, 16), torch.ones(5, 16).char(), torch.randn(5), torch.randn(5)),
        torch.empty(3, 5),
    ),
    "grouped_linear": lambda: (
        *(torch.randn(3, 16), torch.randn(2, 5, 16), None, torch.tensor([0, 1, 3])),
        torch.empty(3, 5),
    ),
    "weighted_sum": lambda: (
        *(torch.randn(6, 16), torch.arange(6).view(3, 2), torch.randn(3, 2), torch.empty(3, 16)),
    ),
    "apply_rope": lambda: (
        *(torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.arange(3), torch.randn(5, 6)),
        *(torch.empty(3, 4, 8), torch.empty(3, 2, 8), True),
    ),
    "greedy": lambda: (torch.randn(3, 50), torch.empty(3).long()),
    "sample": lambda: (
        *(torch.randn(3, 50), torch.ones(3), torch.ones(3).int(), torch.ones(3), torch.zeros(3)),
        *(torch.arange(3), torch.arange(3), torch.empty(3).long()),
    ),
    "token_logprobs": lambda: (
        *(torch.randn(3, 50), torch.arange(3), torch.arange(3), torch.empty(3)),
    ),
    "top_logprobs": lambda: (
        *(torch.randn(3, 50), torch.arange(3), torch.arange(3)),
        *(torch.empty(3, 4).long(), torch.empty(3, 4), torch.empty(3, 4).long()),
    ),
    "apply_penalties": lambda: (
        *(torch.randn(3, 50), torch.arange(3), torch.arange(4), torch.arange(3)),
        *(torch.arange(3).int(), torch.ones(3), torch.zeros(3), torch.zeros(3)),
    ),
    "apply_token_bitmask": lambda: (
        *(torch.randn(3, 50), torch.ones(3, 2).int(), torch.arange(3)),
    ),
}
# Those of attention backends, of the storage of a cache of this shape.
SHAPE = KVCacheShape(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, dtype=torch.float32)
SLOTS = torch.arange(8, 11)
STEP = tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [3], [[1]]))
ATTENTION = {
    "write_kv_cache": lambda storage: (*torch.randn(2, 3, 2, 8), storage, 1, SLOTS),
    "rope_and_write_kv_cache": lambda storage: (
        *(torch.randn(3, 4, 8), *torch.randn(2, 3, 2, 8), torch.arange(3), torch.randn(5, 6)),
        *(storage, 1, SLOTS, torch.empty(3, 4, 8), True),
    ),
    "paged_attention": lambda storage: (
        *(torch.randn(3, 4, 8), storage, 1, *STEP, 0.5, 2, 9.0, torch.zeros(4)),
        torch.empty(3, 4, 8),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_holds_what_torch_asks_of_one(name):
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, OPERATIONS[name]())


@pytest.mark.skipif(native_instructions() is None, reason="no native code can be had")
@pytest.mark.parametrize("name", ATTENTION)
def test_an_operation_of_native_attention_holds_what_torch_asks_of_one(name):
    instructions = native_instructions()
    storage = NativeAttention(SHAPE, instructions).allocate(2).storage
    arguments = (*ATTENTION[name](storage), instructions.name)
    torch.library.opcheck(getattr(torch.ops.octavo, f"native_{name}").default, arguments)


@pytest.mark.skipif(native_instructions() is None, reason="no native code can be had")
def test_what_adapters_add_holds_what_torch_asks_of_an_operation():
    table, name = torch.zeros(2, 4).long(), native_instructions().name
    step = (torch.randn(3, 5), torch.randn(3, 16), table, torch.arange(2), torch.tensor([0, 0, 2]))
    torch.library.opcheck(torch.ops.octavo.low_rank_add.default, (*step, False, name))


@pytest.mark.parametrize(
    "name", ["reference_write_kv_cache", "reference_paged_attention", "folded_paged_attention"]
)
def test_an_operation_of_attention_in_torch_holds_what_torch_asks_of_one(name):
    storage = ReferenceAttention(SHAPE, torch.device("cpu")).allocate(2).storage
    arguments = ATTENTION[name.split("_", 1)[1]](storage)
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, arguments)


def norms_in_place(x, weight):
    y = rms_norm(x, weight, 1e-5)
    rms_norm(y, weight, 1e-5, out=y)
    return add_rms_norm(y, x, weight, 1e-5, residual_out=x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_gives_the_same_bits_and_writes_where_it_is_told(dynamic):
    x, weight = torch.randn(3, 16), torch.randn(16)
    expected = norms_in_place(x.clone(), weight)
    compiled = torch.compile(norms_in_place, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    actual = compiled(x, weight)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(x, expected[1])
