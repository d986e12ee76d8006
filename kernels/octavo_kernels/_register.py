"""Registration with torch, so that torch.compile and the capture of graphs pass through operations.

Knows no operation. To add one, decorate the function that computes it into memory it is given:

    @register("rms_norm", "Tensor x, Tensor weight, float eps, Tensor(a!) out")
    def _rms_norm(x, weight, eps, out) -> None:
        ...choose a path and compute...

    def rms_norm(x, weight, eps, *, out=None):
        ...check, allocate `out`...
        _rms_norm(x, weight, eps, out)
        return out

Arguments are tensors, numbers, strings and lists of them, by position; state goes in as those, for
a compiled graph holds nothing else. `(a!)`, `(b!)` and so on mark what is written. It may be the
same memory as an argument that is read, like `q_out` and `q`: a compiler copies what it must.

What the decorator makes calls the function as it is, and goes through torch.ops.octavo only under a
compiler: always to go through it would cost microseconds a call. Hence the public function checks
and allocates with torch operations alone, so that a compiler can read it; caches, environment
variables and native pointers belong in the function that is registered, which no compiler enters.
"""

from collections.abc import Callable
from typing import TypeVarTuple

import torch
from torch.compiler import is_compiling

_Arguments = TypeVarTuple("_Arguments")


def register(
    name: str, arguments: str
) -> Callable[[Callable[[*_Arguments], None]], Callable[[*_Arguments], None]]:
    """Register a function as the operation torch.ops.octavo.<name> of CPUs and CUDA devices.

    Args:
        name: Its name, not taken yet.
        arguments: Their types and names, as in a schema of torch.library; the function returns
            nothing.

    Returns:
        A decorator. What it makes of the function takes the same arguments.
    """
    qualified = f"octavo::{name}"
    # Kernels read strides that were checked while a compiler traced: it must not choose others.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    torch.library.define(qualified, f"({arguments}) -> ()", tags=tags)
    operation = getattr(torch.ops.octavo, name).default

    def decorate(function: Callable[[*_Arguments], None]) -> Callable[[*_Arguments], None]:
        torch.library.impl(qualified, ("cpu", "cuda"), function)
        torch.library.register_fake(qualified, _compute_nothing)

        def call(*arguments: *_Arguments) -> None:
            if is_compiling():
                operation(*arguments)
            else:
                function(*arguments)

        return call

    return decorate


def _compute_nothing(*_: object) -> None:
    """Stand in for any operation on tensors without memory, whose results exist already."""
