"""`PackedLinear`: a linear layer whose result for a row need not depend on the other rows.

On a CPU the weight is laid out once, for this package's native code or, without it, for oneDNN, and
the plain form is dropped. Elsewhere, and where neither can pack the dtype, `octavo_kernels.linear`
multiplies by the plain form, to the same bits for any number of rows. On a GPU one may have torch's
own product instead, which may be faster, and which makes no such promise: it chooses its routine by
the number of rows. `Embedding` may share a weight with one. Knows nothing of models or checkpoints.

A weight may be quantised to 8 bits: on a CPU to the integers of native code, which quantises rows
too; else to what `octavo_kernels.linear` takes, which does not.

Native code sums every output in the order of the inputs, whatever the number of rows. It is as fast
as oneDNN or faster for every dtype and instruction set but many rows of float32 with AVX-512. CPU
time on one core of an AMD AVX512-BF16, two layers of SmolLM2-135M and its vocabulary (of one row
where there are more than 64), ms natively / by oneDNN, kept to the same instructions; by torch's
own linear where oneDNN packs no such dtype; at 1 / 32 / 256 rows:

    avx512-bf16  bfloat16   2.1 / 2.4    6.4 / 7.3    9.3 / 10
    avx512       bfloat16   2.7 / 7.9    12 / 34       18 / 51
    avx512       float32    4.3 / 4.6    12 / 13       25 / 19
    avx512       float16    1.8 / 2.9    11 / 95       23 / 143
    avx2         float32    4.7 / 7.0    22 / 24       34 / 36
    avx2         bfloat16   2.4 / 3.1    27 / 94       50 / 144
    portable     float32    4.5 / 14     52 / 57       83 / 88
    portable     bfloat16   4.1 / 8.1    64 / 247     105 / 392

Determinism without native code. A row must have the same bits whatever the number of rows it is
computed with, or a request would answer differently in a batch than alone. Measured (AMD
AVX512-BF16, torch 2.13, 1 to 16 threads, 1 to 1,000 rows, inner sizes 7 to 8,192):

- bfloat16, packed or plain: the same bits from two rows on; a single row takes another routine,
  which differs where the inner size is large. Rounding to bfloat16 hides that nearly always (about
  one value in 5,000 shows it), so it takes many rows to see.
- float32 packed with the hint below: the same, but every value may differ for a single row.
- float32 plain (MKL): the bits differ between 1, 2-3, 4-7 and 8 or more rows, and now and then
  between larger numbers where the threads share the rows unevenly.

Hence a single row is padded to two, and `octavo_kernels.linear` gives torch the same number of rows
each time. A row's place among the rows changes nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from octavo_kernels import (
    PackedWeight,
    linear,
    pack_weight,
    packed_embedding,
    packed_linear,
    quantize_weight,
)

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Multiplies x [rows, in] by a plain weight [out, in], transposed, and adds a bias [out] if any."""

# Rows the packed layout is chosen for; one layout serves every number of rows.
_PACKING_ROWS = 32
_MIN_ROWS = 2


def plain_product(device: torch.device, *, deterministic: bool) -> Product:
    """Return what multiplies by plain weights: torch's own product on a GPU that need not repeat.

    A CPU always repeats: its bits never depend on the number of rows.
    """
    return linear if deterministic or device.type == "cpu" else F.linear


class PackedLinear:
    """Multiply rows by a fixed weight.

    Args:
        weight: [out, in]; not kept when it can be packed, so drop your own reference to free it.
        bias: [out] or None.
        is_gated: as `octavo_kernels.pack_weight` takes it.
        stored_as: what to quantise it to, one of `octavo_kernels.EIGHT_BITS`; None for nothing.
        deterministic: Whether a row must have the same bits whatever the other rows are; on a CPU
            it has in any case.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
        stored_as: torch.dtype | None = None,
        deterministic: bool = True,
    ) -> None:
        self.deterministic = deterministic
        self.out_features, self.in_features = weight.shape
        self.is_quantized = stored_as is not None
        self.num_bytes = packed_bytes(weight.shape, weight.dtype, of_8_bits=self.is_quantized)
        """What the weight takes, but for padding."""
        self._bias = bias
        self.native: PackedWeight | None = None
        """The weight for native code, or None where that does not serve."""
        if stored_as in (None, torch.int8):
            to_int8 = self.is_quantized
            self.native = pack_weight(weight, bias, is_gated=is_gated, to_int8=to_int8)
        self._quantized: tuple[torch.Tensor, torch.Tensor] | None = None
        self._packed: torch.Tensor | None = None
        if self.native is None and stored_as is not None:
            self._quantized = quantize_weight(weight, stored_as)
        elif self.native is None:
            self._packed = _pack(weight)
        forms = (self.native, self._quantized, self._packed)
        self._plain = weight if forms == (None, None, None) else None
        self._multiply = plain_product(weight.device, deterministic=deterministic)

    @property
    def keeps_weight(self) -> bool:
        """Whether the weight that this was made of is in use, and must not be overwritten."""
        return self._plain is not None

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ weight.T + bias, [rows, out], for x [rows >= 1, in] of its dtype.

        Args:
            x: the rows.
            out: receives the result, in x's dtype or in float32: the same numbers.
        """
        if self.native is not None:
            return packed_linear(x, self.native, out=out)
        product = self._product(x)
        return product if out is None else out.copy_(product)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._quantized is not None:
            elements, scales = self._quantized
            return linear(x, elements, self._bias, scales=scales)
        if self._packed is not None:
            if x.shape[0] >= _MIN_ROWS:
                return _multiply_packed(x, self._packed, self._bias)
            return _multiply_packed(x.expand(_MIN_ROWS, -1), self._packed, self._bias)[:1]
        assert self._plain is not None
        return self._multiply(x, self._plain, self._bias)


def packed_bytes(shape: Sequence[int], dtype: torch.dtype, *, of_8_bits: bool) -> int:
    """Return the bytes of weights [..., out, in]; those of 8 bits have a scale for each output."""
    outputs = math.prod(shape[:-1])
    if of_8_bits:
        return outputs * (shape[-1] + torch.float32.itemsize)
    return outputs * shape[-1] * dtype.itemsize


class Embedding:
    """Look up rows of a fixed weight by token id.

    Args:
        weight: [vocab, hidden]; not kept where `tied` has all of it in a form for native code.
        tied: the projection of the same weight, if there is one.
    """

    def __init__(self, weight: torch.Tensor, tied: PackedLinear | None = None) -> None:
        self.dtype = weight.dtype
        packed = None if tied is None else tied.native
        self._packed = None if packed is None or packed.is_int8 else packed
        self._plain = weight if self._packed is None else None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some tokens, [tokens, hidden], for token_ids [tokens] int64."""
        if self._packed is not None:
            return packed_embedding(self._packed, token_ids)
        assert self._plain is not None
        return self._plain[token_ids]


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in oneDNN's layout, or None where this machine cannot use one."""
    if weight.device.type != "cpu":
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(
            weight, _PACKING_ROWS
        )
        _multiply_packed(weight.new_zeros(1, weight.shape[1]), packed, None)
    except (AttributeError, NotImplementedError, RuntimeError):
        # Private operations: absent in other builds of torch, or the CPU lacks the dtype.
        return None
    return packed


def _multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, packed, bias, "none", [], ""
    )
    return product
