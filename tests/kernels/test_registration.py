"""What torch knows of the operations, and what a compiler makes of functions that call them."""

import pytest
import torch

from octavo_kernels import add_rms_norm, apply_rope, gelu_and_mul, rms_norm, silu_and_mul

pytestmark = pytest.mark.kernels

# name: arguments of the operation, as its public function has checked and allocated them
OPERATIONS = {
    "rms_norm": lambda: (torch.randn(3, 16), torch.randn(16), 1e-5, torch.empty(3, 16)),
    "add_rms_norm": lambda: (
        *torch.randn(2, 3, 16),
        *(torch.randn(16), 1e-5),
        *torch.empty(2, 3, 16),
    ),
    "silu_and_mul": lambda: (torch.randn(3, 16), torch.empty(3, 8)),
    "gelu_and_mul": lambda: (torch.randn(3, 16), torch.empty(3, 8)),
    "apply_rope": lambda: (
        *(torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.arange(3), torch.randn(5, 6)),
        *(torch.empty(3, 4, 8), torch.empty(3, 2, 8), True),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_holds_what_torch_asks_of_one(name):
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, OPERATIONS[name]())


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
