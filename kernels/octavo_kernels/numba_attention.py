"""Paged attention compiled by numba, for a CPU where there is no C++ compiler but numba is.

The cache is the reference's. Numba is no dependency: nothing here imports it before it is known to
be installed, and whatever goes wrong in it leaves another backend to serve. Knows nothing of how
the kernel computes.
"""

import functools
import importlib.util
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo_kernels._attention_check import metadata_error
from octavo_kernels._native.build import cache_directory
from octavo_kernels._register import register
from octavo_kernels.attention import KVCacheShape
from octavo_kernels.reference_attention import ATTEND_ARGUMENTS, ReferenceAttention

if TYPE_CHECKING:
    from octavo_kernels._numba.paged_attention import Kernel

_logger = logging.getLogger(__name__)

# Bits of a cache for numba, which knows neither of the 16-bit types.
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float16: (torch.int16, np.uint16),
    torch.float32: (torch.int32, np.uint32),
}
_SERIAL_SCORES = 2**16  # less work than this is done before another thread has woken


@functools.cache
def _kernel(dtype: torch.dtype) -> "Kernel":
    """Return the kernel for caches of a dtype, compiled unless the user's cache has it."""
    # Here, for the rest of the package works without numba.
    from octavo_kernels._numba.paged_attention import compile_kernel

    return compile_kernel(str(dtype).removeprefix("torch."), cache_directory())


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Return threads that share the work: numba's own would bring a second pool of their kind."""
    return ThreadPoolExecutor(thread_name_prefix="octavo-attention")


@register("numba_paged_attention", ATTEND_ARGUMENTS)
def _paged_attention(
    q: torch.Tensor,
    storage: torch.Tensor,
    layer: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attend from checked queries to one layer of a cache's storage into `out`."""
    kernel = _kernel(q.dtype)
    torch_bits, numpy_bits = _BITS[storage.dtype]
    cache = storage.view(torch_bits).numpy().view(numpy_bits)
    step = query_start_loc.numpy(), seq_lens.numpy(), block_tables.numpy()
    invalid = kernel.find_invalid(*step, window or 0, len(q), len(storage), storage.shape[3])
    if invalid >= 0:
        raise metadata_error(invalid, len(q), len(storage))
    begin, end = int(query_start_loc[0]), int(query_start_loc[-1])
    wide_q, wide_out = q.float().contiguous(), torch.empty(q.shape)
    arguments = (
        *(wide_q.numpy(), wide_out.numpy(), cache, layer, *step),
        *(np.float32(scale), window or 0, np.float32(soft_cap or 0.0)),
        np.zeros(0, np.float32) if sinks is None else sinks.numpy(),
    )
    scores = q.shape[0] * q.shape[1] * int(step[1].max(initial=0))
    workers = torch.get_num_threads() if scores > _SERIAL_SCORES else 1
    others = [_helpers().submit(kernel.attend, *arguments, i, workers) for i in range(1, workers)]
    kernel.attend(*arguments, 0, workers)
    for other in others:
        other.result()
    out[begin:end] = wide_out[begin:end]


class NumbaAttention(ReferenceAttention):
    """Attention backend of the CPU compiled by numba, float32 inside."""

    name = "numba"
    _attend = staticmethod(_paged_attention)


def make_numba_attention(shape: KVCacheShape) -> NumbaAttention | None:
    """Return the numba backend, compiled, or None where numba is missing or fails.

    A failure is logged.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        _kernel(shape.dtype)
    except Exception as error:  # another's compiler: whatever it raises, attention must be served
        _logger.warning("numba cannot compile attention, so torch serves: %s", error)
        return None
    return NumbaAttention(shape, torch.device("cpu"))
