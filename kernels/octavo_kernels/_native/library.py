"""Load the native library once, and decide once whether it is used.

Holds the C signatures. Knows nothing of shapes or of what the functions compute.
"""

import ctypes
import functools
import logging
from typing import Any

import torch

from octavo_kernels._choice import wants_reference
from octavo_kernels._native.build import BuildError, build_library

_logger = logging.getLogger(__name__)

_POINTER, _INT, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_SIGNATURES: dict[str, tuple[type[Any] | None, tuple[type[Any], ...]]] = {
    "octavo_rms_norm": (
        None,
        (_INT, *[_POINTER] * 3, *[_SIZE] * 3, _POINTER, _FLOAT, _INT),
    ),
    "octavo_add_rms_norm": (
        None,
        (_INT, *[_POINTER] * 5, *[_SIZE] * 2, _POINTER, _FLOAT, _INT),
    ),
    "octavo_silu_and_mul": (None, (_INT, *[_POINTER] * 2, *[_SIZE] * 2, _POINTER, _INT)),
    "octavo_gelu_and_mul": (None, (_INT, *[_POINTER] * 2, *[_SIZE] * 2, _POINTER, _INT)),
    "octavo_apply_rope": (_SIZE, (_INT, *[_POINTER] * 6, *[_SIZE] * 6, _INT, _POINTER, _INT)),
    "octavo_write_kv_cache": (_SIZE, (*[_POINTER] * 6, _SIZE, _POINTER, _INT)),
    "octavo_copy_blocks": (None, (*[_POINTER] * 3, *[_SIZE] * 2, _INT)),
    "octavo_paged_attention": (
        _SIZE,
        (*[_POINTER] * 6, _SIZE, _POINTER, _FLOAT, _SIZE, _INT),
    ),
}

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the native library, building it on the first call, or None to use plain torch.

    None when OCTAVO_KERNELS=reference is set, and, after one warning, when it cannot be built.

    Raises:
        ValueError: OCTAVO_KERNELS has another value.
    """
    if wants_reference():
        return None
    try:
        library = ctypes.CDLL(str(build_library()))
    except (BuildError, OSError) as error:
        _logger.warning("using slow torch operations on the CPU: %s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    """Return the native library if it serves tensors like this one, else None."""
    if tensor.dtype not in NATIVE_DTYPES or tensor.device.type != "cpu":
        return None
    return native_library()


def strides_of(*strides: int) -> ctypes.Array[ctypes.c_int64]:
    """Pack strides, in elements, for a native call."""
    return (ctypes.c_int64 * len(strides))(*strides)
