"""Load the native library once, and decide once whether, and for which instructions, it is used.

Holds the C signatures. Knows nothing of shapes or of what the functions compute.
"""

import ctypes
import functools
import logging
import os
from typing import Any

import torch

from octavo_kernels._choice import wants_reference
from octavo_kernels._native.build import BuildError, build_library
from octavo_kernels._native.processor import InstructionSet, usable_instruction_sets

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
    "octavo_layer_norm": (
        None,
        (_INT, *[_POINTER] * 4, *[_SIZE] * 3, _POINTER, _FLOAT, _INT),
    ),
    "octavo_silu_and_mul": (None, (_INT, *[_POINTER] * 2, *[_SIZE] * 2, _POINTER, _INT)),
    "octavo_gelu_and_mul": (None, (_INT, *[_POINTER] * 2, *[_SIZE] * 2, _POINTER, _INT)),
    "octavo_weighted_sum": (_SIZE, (_INT, *[_POINTER] * 4, *[_SIZE] * 4, _POINTER, _INT)),
    "octavo_apply_rope": (_SIZE, (_INT, *[_POINTER] * 6, *[_SIZE] * 6, _INT, _POINTER, _INT)),
    "octavo_write_kv_cache": (_SIZE, (*[_POINTER] * 6, _SIZE, _POINTER, _INT)),
    "octavo_rope_and_write_kv_cache": (
        _SIZE,
        (*[_POINTER] * 10, *[_SIZE] * 4, _INT, _POINTER, _INT),
    ),
    "octavo_copy_blocks": (None, (*[_POINTER] * 3, *[_SIZE] * 2, _INT)),
    "octavo_packed_size": (_SIZE, (_INT, *[_SIZE] * 2)),
    "octavo_pack_weight": (None, (_INT, *[_POINTER] * 2, _INT)),
    "octavo_packed_int8_size": (_SIZE, (_SIZE, _SIZE)),
    "octavo_pack_int8_weight": (None, (_INT, *[_POINTER] * 2, _INT)),
    **dict.fromkeys(
        (
            "octavo_linear",
            "octavo_linear_to_float32",
            "octavo_silu_linear",
            "octavo_gelu_linear",
        ),
        (None, (_INT, *[_POINTER] * 3, _SIZE, *[_POINTER] * 3, _INT)),
    ),
    **dict.fromkeys(
        ("octavo_grouped_linear", "octavo_grouped_silu_linear"),
        (_SIZE, (_INT, *[_POINTER] * 3, _SIZE, _POINTER, _SIZE, _POINTER, _INT)),
    ),
    "octavo_low_rank_sizes": (None, (_POINTER, _SIZE, _POINTER)),
    "octavo_pack_low_rank": (_SIZE, (_POINTER, _SIZE, *[_POINTER] * 5)),
    "octavo_add_low_rank": (
        _SIZE,
        (_INT, *[_POINTER] * 3, _SIZE, *[_POINTER] * 3, _INT),
    ),
    "octavo_embedding": (_SIZE, (_INT, *[_POINTER] * 2, _SIZE, _POINTER, _INT)),
    "octavo_run_layers": (_INT, (*[_POINTER] * 2, _SIZE, *[_POINTER] * 2, _INT)),
    "octavo_shared_sum": (_INT, (_INT, *[_POINTER] * 2, _SIZE)),
    "octavo_shared_gather": (_INT, (*[_POINTER] * 3, _SIZE)),
    "octavo_greedy": (None, (*[_POINTER] * 2, *[_SIZE] * 3, _INT)),
    "octavo_sample": (None, (*[_POINTER] * 8, *[_SIZE] * 3, _INT)),
    "octavo_token_logprobs": (None, (*[_POINTER] * 4, *[_SIZE] * 4, _INT)),
    "octavo_top_logprobs": (None, (*[_POINTER] * 6, *[_SIZE] * 5, _INT)),
    "octavo_apply_penalties": (None, (*[_POINTER] * 8, *[_SIZE] * 5, _INT)),
    "octavo_apply_token_bitmask": (None, (*[_POINTER] * 3, *[_SIZE] * 5, _INT)),
    "octavo_paged_attention": (
        _SIZE,
        (*[_POINTER] * 7, _SIZE, _POINTER, *[_FLOAT] * 2, _SIZE, _INT),
    ),
}

_ELEMENT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in elements.h


@functools.cache
def load_library(instructions: InstructionSet) -> ctypes.CDLL:
    """Return the native library for an instruction set, building it on the first call.

    Raises:
        BuildError: It cannot be built.
        OSError: It cannot be loaded.
    """
    library = ctypes.CDLL(str(build_library(instructions)))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def native_instructions() -> InstructionSet | None:
    """Return the instruction set that native code serves with here, or None to use plain torch.

    Its library is built on the first call: the best instruction set that the compiler knows too, or
    the one that OCTAVO_CPU_INSTRUCTIONS names. None when OCTAVO_KERNELS=reference is set, and,
    after one warning, when no library can be built.

    Raises:
        ValueError: One of the two variables has another value.
    """
    if wants_reference():
        return None
    failure: Exception | None = None
    for instructions in _allowed_instruction_sets():
        try:
            load_library(instructions)
        except (BuildError, OSError) as error:
            failure = failure or error
            continue
        if failure:
            _logger.warning("using native code for %s only: %s", instructions.name, failure)
        return instructions
    _logger.warning("no native code serves on the CPU, so all is slower: %s", failure)
    return None


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the native library for this processor, or None to use plain torch.

    Raises:
        ValueError: As native_instructions.
    """
    instructions = native_instructions()
    return None if instructions is None else load_library(instructions)


def _allowed_instruction_sets() -> list[InstructionSet]:
    usable = usable_instruction_sets()
    choice = os.environ.get("OCTAVO_CPU_INSTRUCTIONS", "")
    allowed = [x for x in usable if choice in ("", x.name)]
    if not allowed:
        raise ValueError(
            f"OCTAVO_CPU_INSTRUCTIONS is {choice!r} but must be unset or one of what this "
            f"processor has, {', '.join(x.name for x in usable)}"
        )
    return allowed


def library_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    """Return the native library if it serves tensors like this one, else None."""
    served = tensor.dtype in _ELEMENT_CODES and tensor.device.type == "cpu"
    return native_library() if served else None


def element_code(dtype: torch.dtype) -> int:
    """Return the number by which native code knows a dtype."""
    return _ELEMENT_CODES[dtype]


def strides_of(*strides: int) -> ctypes.Array[ctypes.c_int64]:
    """Pack strides, in elements, for a native call."""
    return (ctypes.c_int64 * len(strides))(*strides)
