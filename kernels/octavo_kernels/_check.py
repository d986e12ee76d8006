"""The one check of arguments, made before any memory is touched. Knows no operation."""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    like: torch.Tensor | None = None,
    packed: int = 1,
) -> None:
    """Refuse a tensor of the wrong shape, type, device or strides.

    Args:
        name: What the message calls the tensor.
        tensor: The tensor.
        shape: Its expected sizes; None allows any.
        dtypes: The types allowed when `like` is None.
        like: A tensor whose dtype and device it must share.
        packed: How many of its last dimensions must be contiguous with each other.

    Raises:
        ValueError: It does not fit; the message names what was expected and what was given.
    """
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, sizes, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(sizes)} but must be [{wanted}]")
    if like is None:
        if tensor.dtype not in dtypes:
            allowed = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {tensor.dtype} but must be {allowed}")
    elif tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device} but must be {like.dtype} on {like.device}"
        )
    if not _is_packed(tensor, packed):
        raise ValueError(
            f"{name} has strides {list(tensor.stride())} but its last {packed} dimension(s) must "
            "be contiguous"
        )


def _is_packed(tensor: torch.Tensor, dimensions: int) -> bool:
    expected = 1
    for dimension in range(tensor.dim() - 1, tensor.dim() - 1 - dimensions, -1):
        if tensor.shape[dimension] != 1 and tensor.stride(dimension) != expected:
            return False
        expected *= tensor.shape[dimension]
    return True
