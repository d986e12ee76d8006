"""Values of input tensors, read, checked, and refused by name.

Knows no tensor by its name, nor what a value is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidRequest, PromptTooLong
from octavo.triton_model.pb_utils import InferenceRequest

#: Of `sampling_parameters`, and of a request's own parameters: reading JSON stops every other
#: thread, for about 20 ms a megabyte. A list of all ids of a large vocabulary has room.
MAX_PARAMETERS_LENGTH = 2_097_152


def read_flag(name: str, tensors: Mapping[str, npt.NDArray[Any]], default: bool) -> bool:
    """Return the only element of a tensor of booleans, or `default` if there is none of the name.

    Raises:
        InvalidRequest: its shape is not [1].
    """
    return bool(_read_one(name, tensors[name])) if name in tensors else default


def read_string(name: str, array: npt.NDArray[Any]) -> str:
    """Return the only element of a tensor of strings.

    Raises:
        InvalidRequest: its shape is not [1], or it is not UTF-8.
    """
    value = _read_one(name, array)
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} has byte 0x{error.object[error.start]:02x} at position {error.start:,} "
            "but must be valid UTF-8"
        ) from None


def read_parameters(request: InferenceRequest) -> str:
    """Return a request's own parameters as JSON.

    Raises:
        InvalidRequest: a key or a value is not UTF-8, or they are too long.
    """
    try:
        return check_parameters("parameters", request.parameters())
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the request's parameters have byte 0x{error.object[error.start]:02x} "
            "but must be valid UTF-8"
        ) from None


def check_parameters(name: str, text: str) -> str:
    """Return parameters as JSON if they are short enough to be read.

    Raises:
        InvalidRequest: they are not.
    """
    if len(text) > MAX_PARAMETERS_LENGTH:
        raise InvalidRequest(
            f"{name} has {len(text):,} characters but must have at most {MAX_PARAMETERS_LENGTH:,}"
        )
    return text


def check_prompt_bytes(name: str, array: npt.NDArray[Any], max_prompt_bytes: int) -> None:
    """Refuse a tensor of strings or ids that is too long to be a prompt.

    Raises:
        PromptTooLong: names the tensor, its bytes and the option.
    """
    is_text = array.dtype == np.object_
    num_bytes = sum(map(len, array.flat)) if is_text else array.nbytes
    if num_bytes > max_prompt_bytes:
        raise PromptTooLong(
            f"{name} has {num_bytes:,} bytes but max_prompt_bytes is {max_prompt_bytes:,}; "
            "shorten it or raise max_prompt_bytes in engine.json"
        )


def read_token_ids(name: str, array: npt.NDArray[Any], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a tensor [n] of integers.

    Raises:
        InvalidRequest: it is empty, of another rank, or has an id outside [0, vocab_size).
    """
    if array.ndim != 1 or not array.size:
        raise InvalidRequest(
            f"{name} has shape {list(array.shape)} but must have shape [n] with n of at least 1"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        raise InvalidRequest(
            f"{name} has {array[wrong[0]]} at position {wrong[0]:,} but token ids are "
            f"0 to {vocab_size - 1}"
        )
    return tuple(array.tolist())


def _read_one(name: str, array: npt.NDArray[Any]) -> Any:
    if array.shape != (1,):
        raise InvalidRequest(f"{name} has shape {list(array.shape)} but must have shape [1]")
    return array[0]
