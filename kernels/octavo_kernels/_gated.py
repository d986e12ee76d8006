"""What the gated activations share: the check of their arguments and the choice of a path.

Knows nothing of the activations but their names.
"""

from collections.abc import Callable

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_gated
from octavo_kernels._native.library import element_code, library_for, strides_of
from octavo_kernels._register import register


def check_gate_up(name: str, gate_up: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Raise ValueError unless the activation `name` takes these; return `out`, made if None."""
    check_tensor(f"{name}: gate_up", gate_up, (None, None))
    tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"{name}: gate_up has {width} columns but must have an even number")
    shape = (tokens, width // 2)
    if out is None:
        return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    check_tensor(f"{name}: out", out, shape, like=gate_up)
    return out


def register_gated(
    name: str, reference: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the operation `name` of a checked gate_up into `out`, registered with torch."""
    native_name = f"octavo_{name}"

    @register(name, "Tensor gate_up, Tensor(a!) out")
    def activate_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        capability = gpu_capability(gate_up)
        if capability is not None:
            from octavo_kernels._triton.gated import launch_gated

            launch_gated(name, gate_up, out, choose_gated(capability))
            return
        library = library_for(gate_up)
        if library is None:
            out.copy_(reference(gate_up))
            return
        getattr(library, native_name)(
            element_code(gate_up.dtype),
            gate_up.data_ptr(),
            out.data_ptr(),
            *out.shape,
            strides_of(gate_up.stride(0), out.stride(0)),
            torch.get_num_threads(),
        )

    return activate_and_mul
