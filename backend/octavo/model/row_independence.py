"""Torch functions whose result for a row depends on the rows beside it, and ones to take instead.

Torch chooses a product's routine by the number of rows, and computes what is left at the end of a
vector, or of a thread's share, with another exponential than the rest. Here rows are multiplied a
fixed number at a time, and activations are made of functions that do not differ so. Measured with
torch 2.13 on 1 to 3 threads and odd sizes: exp, tanh, erf, cos, sin, softmax, norms and sums along
a row give a number the same bits wherever it stands; sigmoid, silu, softplus, mish and gelu do not.
Knows nothing of models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from octavo_kernels import linear

#: Rows that torch multiplies at a time.
_TILE_ROWS = 32


def times_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., in] by a weight [in, out], a fixed number of rows at a time."""
    rows = x.reshape(-1, x.shape[-1])
    is_small = weight.shape[1] < _TILE_ROWS
    if weight.t().is_contiguous() or is_small or x.device.type != "cpu":
        product = linear(rows.contiguous(), weight.t().contiguous())
    else:
        padded = F.pad(rows, (0, 0, 0, -len(rows) % _TILE_ROWS))
        tiles = [torch.mm(tile, weight) for tile in torch.split(padded, _TILE_ROWS)]
        product = torch.cat(tiles)[: len(rows)] if tiles else rows.new_empty(0, weight.shape[1])
    return product.view(*x.shape[:-1], weight.shape[1])


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    product = linear(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous(), bias)
    return product.view(*x.shape[:-1], weight.shape[0])


def _matmul(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if x.dim() >= 2 and x.shape[-1] > 1:
        if other.dim() == 2:
            return times_weight(x, other)
        if other.dim() == x.dim() == 3 and len(x) == len(other):
            return torch.stack([times_weight(*pair) for pair in zip(x, other, strict=True)])
    # With a single term in each sum there is but one way to add.
    return torch.matmul(x, other)


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return times_weight(x, weight) + bias


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    wide = x.float()
    if approximate == "none":
        return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def _softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    scaled = x.float() * beta
    soft = torch.log1p(torch.exp(scaled.clamp(max=threshold))) / beta
    return torch.where(scaled > threshold, x.float(), soft).to(x.dtype)


def _mish(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return (x.float() * torch.tanh(_softplus(x.float()))).to(x.dtype)


#: By what a module calls: what computes the same for each row on its own.
REPLACEMENTS: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch.addmm: _addmm,
    torch.sigmoid: _sigmoid,
    torch.Tensor.sigmoid: _sigmoid,
    F.sigmoid: _sigmoid,
    F.silu: _silu,
    F.gelu: _gelu,
    F.softplus: _softplus,
    F.mish: _mish,
}


class RowIndependence(TorchFunctionMode):
    """Have torch's functions replaced while it is entered."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call what replaces a function, or the function itself."""
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def make_rows_independent(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Have the named modules of a model, and what they call, take the replacements."""
    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(_call, module.forward)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with RowIndependence():
        return forward(*args, **kwargs)


class CallRecorder(TorchFunctionMode):
    """Note, while it is entered, which modules of a model are called, and what they call.

    Args:
        model: whose modules are watched from now on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.row_dependent: set[str] = set()
        """Names of modules, each the innermost one, that call a function with a replacement."""
        self.called_first: list[str] = []
        """Names of modules that the model itself calls, in order."""
        self._inside: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(self._leave)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the caller if it matters, and call the function."""
        if func in REPLACEMENTS and self._inside:
            self.row_dependent.add(self._inside[-1])
        return func(*args, **(kwargs or {}))

    def _enter(self, name: str, *_: object) -> None:
        if self._inside == [""]:
            self.called_first.append(name)
        self._inside.append(name)

    def _leave(self, *_: object) -> None:
        self._inside.pop()
