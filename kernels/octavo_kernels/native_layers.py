"""All layers of a decoder in one native call, on the CPU.

    hidden -> norm -> qkv -> norm of q and k -> rotate -> write -> attention -> o -> norm
           -> add, norm -> gate_up, gated activation -> down -> norm -> add, next norm

Each norm and the rotation only if it is there.

The bits are those of this package's operations called one by one; a step of a small model spends
half its time on the way to them. Knows nothing of embeddings, vocabularies or checkpoints.
"""

import ctypes
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from octavo_kernels._attention_check import metadata_error
from octavo_kernels._check import check_tensor
from octavo_kernels._native.attention import (
    Batch,
    CacheShape,
    batch_of,
    cache_shape,
    library_named,
    write_error,
)
from octavo_kernels._native.callback import native_callback
from octavo_kernels._native.library import element_code
from octavo_kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    KVCacheShape,
)
from octavo_kernels.layer_parts import (
    LayerParts,
    SharedParts,
    adapter_slots,
    check_parts,
    table_shape,
)
from octavo_kernels.low_rank import (
    NativeAdaptedRows,
    adapted_error,
    check_adapted,
    native_adapted,
)
from octavo_kernels.native_attention import NativeAttention
from octavo_kernels.packed_linear import NativeLinear

_WRITE, _SUM, _ADAPTERS = 1, 3, 4  # as Stage in layers.cpp
_NORMS = "input_norm attention_norm mlp_norm output_norm q_norm k_norm".split()


class _Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in "element hidden inner q_heads rotary_dim max_len interleaved gelu "
            "norms_all_heads".split()
        ],
        *[(name, ctypes.c_float) for name in ("eps", "scale", "residual_scale")],
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (*_NORMS, "cos_sin")],
        *[(name, NativeLinear) for name in "qkv o gate_up down".split()],
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("soft_cap", ctypes.c_float),
        *[(f"{name}_adapters", ctypes.c_void_p) for name in "qkv o gate_up down".split()],
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("positions", "slots")],
        ("batch", Batch),
        ("cache", CacheShape),
        *[
            (name, ctypes.c_void_p)
            for name in "storage residual hidden heads attended active sum exchange".split()
        ],
        ("adapted", NativeAdaptedRows),
    ]


class NativeLayers:
    """The layers of one decoder, and memory for the largest step so far.

    Args:
        cache: Of the cache that steps write and read: one that native attention serves.
        parts: The layers, at least one; their weights packed for the same instructions.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """

    def __init__(
        self, cache: KVCacheShape, shared: SharedParts, parts: Sequence[LayerParts]
    ) -> None:
        first = parts[0]
        self._cache, self._shared, self._parts = cache, shared, parts
        self._hidden, self._inner = first.qkv.in_features, first.down.in_features
        self._heads = first.o.in_features // cache.head_dim
        self._library = library_named(first.qkv.instructions)
        check_parts(cache, shared, parts)
        self._num_slots = adapter_slots(parts)
        max_len, rotary_dim = table_shape(parts)
        self._model = _Model(
            element_code(cache.dtype),
            *(self._hidden, self._inner, self._heads, rotary_dim, max_len, shared.interleaved),
            *(shared.gelu, shared.norms_all_heads),
            *(shared.eps, shared.scale, shared.residual_scale),
        )
        self._layers = (_Layer * len(parts))(*map(_native_layer, parts))
        self._scratch = self._allocate(0)

    def __call__(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        adapted: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one step through all layers; mutates `residual`, and `cache` at the step's slots.

        Args:
            residual: [num_tokens, hidden] of the cache's dtype, contiguous: the embeddings, and
                afterwards the residual stream to which the result is still to be added.
            positions: [num_tokens] int64, each in [0, max_len).
            cache: What the native attention backend allocated for this shape.
            metadata: Describes the same tokens.
            adapted: Rows and starts, as `low_rank_add_` takes them; None if no row has an adapter.

        Returns:
            The last layer's output [num_tokens, hidden], in memory that the next call overwrites.

        Raises:
            ValueError: A shape, dtype, device or stride is not as above.
            IndexError: A position, slot, row or block is outside; see AttentionBackend and
                `low_rank_add_`. Some layers may have been written then.
        """
        self._check_step(residual, positions, cache, metadata)
        num_tokens = len(residual)
        if num_tokens > len(self._scratch[0]):
            self._scratch = self._allocate(num_tokens)
        step = _Step(
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            batch_of(
                metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, num_tokens
            ),
            cache_shape(cache.storage, self._cache.head_dim),
            *(cache.storage.data_ptr(), residual.data_ptr()),
            *[memory.data_ptr() for memory in self._scratch],
        )
        hidden, invalid = self._scratch[0][:num_tokens], ctypes.c_int64(-1)
        sum_, exchange = self._shared.sum_hidden_, self._shared.exchange
        summing: AbstractContextManager[int | None] = nullcontext()
        if adapted is not None and self._num_slots is not None:
            check_adapted("native_layers", *adapted, self._num_slots)
            step.adapted = native_adapted(*adapted)
        if exchange is not None:
            step.exchange = ctypes.addressof(exchange.native)
        elif sum_ is not None:
            summing = native_callback(functools.partial(sum_, hidden))
        with summing as step.sum:
            stage = self._library.octavo_run_layers(
                ctypes.byref(self._model),
                *(ctypes.byref(self._layers), len(self._parts)),
                *(ctypes.byref(step), ctypes.byref(invalid)),
                torch.get_num_threads(),
            )
        if stage == _SUM and exchange is not None:
            exchange.raise_failure()
        if stage == _WRITE:
            raise write_error(
                *(positions, metadata.slot_mapping, invalid.value),
                *(self._model.max_len, cache.storage, self._cache.head_dim),
            )
        if stage == _ADAPTERS and adapted is not None:
            raise adapted_error("native_layers", invalid.value, adapted, num_tokens)
        if stage:
            raise metadata_error(invalid.value, num_tokens, cache.num_blocks)
        return hidden

    def _allocate(self, num_tokens: int) -> list[torch.Tensor]:
        """Return memory for a step: hidden, heads, attended and active."""
        cache = self._cache
        all_heads = self._heads + 2 * cache.num_kv_heads
        widths = (
            self._hidden,
            all_heads * cache.head_dim,
            self._heads * cache.head_dim,
            self._inner,
        )
        return [torch.empty(num_tokens, width, dtype=cache.dtype) for width in widths]

    def _check_step(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Raise ValueError unless a step's arguments are as `__call__` wants them."""
        shape, int64 = self._cache, (torch.int64,)
        num_tokens = residual.shape[0]
        check_tensor(
            "native_layers: residual",
            residual,
            (None, self._hidden),
            dtypes=(shape.dtype,),
            beside=cache.storage,
            packed=2,
        )
        for name, tensor in (("positions", positions), ("slot_mapping", metadata.slot_mapping)):
            check_tensor(
                f"native_layers: {name}", tensor, (num_tokens,), dtypes=int64, beside=residual
            )
        elements = shape.head_dim * shape.block_size
        check_tensor(
            "native_layers: cache",
            cache.storage,
            (None, len(self._parts), 2, shape.num_kv_heads, elements),
            dtypes=(shape.dtype,),
            packed=5,
        )


def make_native_layers(
    attention: AttentionBackend, shared: SharedParts, parts: Sequence[LayerParts]
) -> NativeLayers | None:
    """Return the layers for a native backend's cache, or None where another backend serves."""
    if not isinstance(attention, NativeAttention):
        return None
    return NativeLayers(attention.shape, shared, parts)


def _native_layer(layer: LayerParts) -> _Layer:
    return _Layer(
        *[_pointer(getattr(layer, name)) for name in (*_NORMS, "cos_sin")],
        *[weight.native() for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)],
        *(_pointer(layer.sinks), layer.window or 0, layer.soft_cap or 0.0),
        *[_pointer(None if x is None else x.pointers) for x in layer.low_ranks.tables()],
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
