"""Rotary position embedding, of split halves or of interleaved pairs.

The first rotary_dim entries of a head are pairs (a, b) that turn by the angles of the position:
a' = a * cos - b * sin, b' = b * cos + a * sin; the entries after them pass unchanged. Pair i is
entries i and rotary_dim / 2 + i, or 2 * i and 2 * i + 1 if interleaved. Computed in float32 and
rounded once. Knows nothing of how the table of angles was made.
"""

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._choice import gpu_capability
from octavo_kernels._launch import choose_apply_rope
from octavo_kernels._native.library import element_code, library_for, strides_of
from octavo_kernels._register import register


def apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k [tokens, heads, head_dim] by cos_sin [max_len, rotary_dim] at positions."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    sizes, of_pair = ((half, 2), -1) if interleaved else ((2, half), -2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x[..., :rotary_dim].float().reshape(*x.shape[:2], *sizes).unbind(of_pair)
        turned = torch.stack([low * cos - high * sin, high * cos + low * sin], dim=of_pair)
        return torch.cat([turned.flatten(-2).to(x.dtype), x[..., rotary_dim:]], dim=-1)

    return rotate(q), rotate(k)


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: [tokens, q_heads, head_dim], float32, bfloat16 or float16; tokens may be strided (a slice
            of a fused projection), the rest contiguous.
        k: [tokens, kv_heads, head_dim], likewise, of q's dtype.
        positions: [tokens] int64, each in [0, max_len).
        cos_sin: [max_len, rotary_dim] float32, contiguous: cosines, then sines, of the
            rotary_dim / 2 angles of each position; rotary_dim is even and at most head_dim.
        q_out: Receives the rotated q; may be q.
        k_out: Receives the rotated k; may be k.
        interleaved: Whether pairs lie side by side; else in two halves.

    Returns:
        `(q, k)` rotated, in `q_out` and `k_out` or in new contiguous tensors.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above, or rotary_dim is over 256 on
            a GPU.
        IndexError: A position is outside the table. On a GPU, where to raise would be to wait, its
            row becomes NaN.
    """
    check_rope(q, k, positions, cos_sin)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_out is None else q_out
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if k_out is None else k_out
    check_tensor("apply_rope: q_out", q_out, q.shape, like=q, packed=2)
    check_tensor("apply_rope: k_out", k_out, k.shape, like=k, packed=2)
    _apply_rope(q, k, positions, cos_sin, q_out, k_out, interleaved)
    return q_out, k_out


@register(
    "apply_rope",
    "Tensor q, Tensor k, Tensor positions, Tensor cos_sin, Tensor(a!) q_out, Tensor(b!) k_out, "
    "bool interleaved",
)
def _apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    interleaved: bool,
) -> None:
    """Compute `apply_rope` of checked tensors into `q_out` and `k_out`."""
    tensors = (q, k, q_out, k_out)
    capability = gpu_capability(q)
    if capability is not None:
        from octavo_kernels._triton.apply_rope import launch_apply_rope

        config = choose_apply_rope(cos_sin.shape[1] // 2, capability)
        launch_apply_rope(tensors, positions, cos_sin, config, interleaved=interleaved)
        return
    library = library_for(q)
    if library is None:
        outside = (positions < 0) | (positions >= len(cos_sin))
        if q.device.type == "cpu" and outside.any():
            raise position_error("apply_rope", int(positions[outside][0]), len(cos_sin))
        q_turned, k_turned = apply_rope_reference(q, k, positions, cos_sin, interleaved=interleaved)
        q_out.copy_(q_turned)
        k_out.copy_(k_turned)
        return
    invalid = library.octavo_apply_rope(
        element_code(q.dtype),
        *[tensor.data_ptr() for tensor in (*tensors, positions, cos_sin)],
        *(len(q), q.shape[1], k.shape[1], q.shape[2], cos_sin.shape[1], len(cos_sin)),
        interleaved,
        strides_of(q.stride(0), q_out.stride(0), k.stride(0), k_out.stride(0)),
        torch.get_num_threads(),
    )
    if invalid >= 0:
        raise position_error("apply_rope", int(positions[invalid]), len(cos_sin))


def check_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Raise ValueError unless these are as `apply_rope` wants them."""
    check_tensor("apply_rope: q", q, (None, None, None), packed=2)
    tokens, _, head_dim = q.shape
    check_tensor("apply_rope: k", k, (tokens, None, head_dim), like=q, packed=2)
    check_tensor("apply_rope: positions", positions, (tokens,), dtypes=(torch.int64,), beside=q)
    check_tensor(
        "apply_rope: cos_sin", cos_sin, (None, None), dtypes=(torch.float32,), beside=q, packed=2
    )
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"apply_rope: cos_sin has {rotary_dim} columns but must have an even number of at most "
            f"head_dim {head_dim}"
        )


def position_error(name: str, position: int, max_len: int) -> IndexError:
    """Return the error of a position that the table of angles does not cover."""
    return IndexError(f"{name}: position {position} is outside the {max_len} of cos_sin")
