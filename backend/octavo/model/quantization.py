"""Option `quantization`: what linear weights are stored as, and where that is served.

Knows nothing of models.
"""

from __future__ import annotations

import torch

from octavo.errors import ConfigError
from octavo_kernels import packs_weights, quantized_types

QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the option's value; but for `none`."""

_FP8_DEVICES = "a GPU of compute capability 8.9 or later, or AMD's gfx942"


def choose_quantization(
    option: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """Return what the weights of a model are stored as, None for their own dtype.

    Args:
        option: `quantization`.
        dtype: of the model.
        device: where it computes.

    Raises:
        ConfigError: nothing computes with such weights there.
    """
    if option == "none":
        return None
    reason = quantization_refusal(option, dtype, device)
    if reason is None:
        return QUANTIZED[option]
    served = [name for name in QUANTIZED if quantization_refusal(name, dtype, device) is None]
    allowed = " or ".join(f"{name!r}" for name in ("none", *served))
    raise ConfigError(f"option quantization is {option!r}, which {reason}; it must be {allowed}")


def weights_text(dtype_name: str, option: str) -> str:
    """Say what weights are stored as, such as `bfloat16, int8 layers`, of option `quantization`."""
    return dtype_name if option == "none" else f"{dtype_name}, {option} layers"


def quantization_refusal(option: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a value of the option but `none` is not served, or None where it is."""
    if device.type == "cpu":
        if option == "fp8":
            return f"takes {_FP8_DEVICES}, and the device is cpu"
        name = str(dtype).removeprefix("torch.")
        is_served = packs_weights(dtype, device)
        return None if is_served else f"takes native code, and none serves {name} on {device} here"
    served = quantized_types(device)
    if not served:
        return f"takes kernels in the Triton language, and none serve on {device} here"
    if QUANTIZED[option] not in served:
        return f"takes {_FP8_DEVICES}, and {device} is not one"
    return None
