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
    beside: torch.Tensor | None = None,
    packed: int = 1,
) -> None:
    """Refuse a tensor of the wrong shape, type, device or strides.

    Args:
        name: What the message calls the tensor.
        tensor: The tensor.
        shape: Its expected sizes; None allows any.
        dtypes: The types allowed when `like` is None.
        like: A tensor whose dtype and device it must share.
        beside: A tensor whose device it must share.
        packed: How many of its last dimensions must be contiguous with each other.

    Raises:
        ValueError: It does not fit; the message names what was expected and what was given.
    """
    if not _has_shape(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)} but must be [{wanted}]")
    if like is None:
        if tensor.dtype not in dtypes:
            allowed = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {tensor.dtype} but must be {allowed}")
    elif tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device} but must be {like.dtype} on {like.device}"
        )
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device} but must be on {beside.device}")
    if not (tensor.is_contiguous() or _is_packed(tensor, packed)):
        raise ValueError(
            f"{name} has strides {list(tensor.stride())} but its last {packed} dimension(s) must "
            "be contiguous"
        )


# Called several times an operation, tens of times a layer: plain loops are half a microsecond, and
# generator expressions two.
def _has_shape(given: Sequence[int], expected: Sequence[int | None]) -> bool:
    if len(given) != len(expected):
        return False
    for want, got in zip(expected, given, strict=True):
        if want != got and want is not None:
            return False
    return True


def _is_packed(tensor: torch.Tensor, dimensions: int) -> bool:
    strides, expected = tensor.stride(), 1
    for size, stride in zip(tensor.shape[: -dimensions - 1 : -1], strides[::-1], strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
