"""Sums and gathers over processes of one machine, through a memory that they share.

    sum_ of x_rank -> round(((float(x_0) + x_1) + x_2) + ...) on every rank
    gather of x_rank -> [x_0, x_1, ...] on rank 0

A process that waits looks often at first, then sleeps until the kernel wakes it. Knows nothing of
how processes are started, nor how they come to share a memory.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from octavo_kernels._check import check_tensor
from octavo_kernels._native.library import element_code, native_library

PIECE_BYTES = 1 << 18  # as kPieceBytes in shared_exchange.cpp
_LINE_BYTES = 64
_GIVES_UP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_double)


class NativeExchange(ctypes.Structure):
    """As SharedExchange in shared_exchange.h."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("rank", "size")],
        ("gives_up", _GIVES_UP),
        ("sent_bytes", ctypes.c_int64),
        ("round", ctypes.c_uint32),
    ]


def sum_in_order_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, added in float32 in their order, rounded once."""
    total = functools.reduce(torch.add, parts[1:], parts[0].float())
    return total.to(parts[0].dtype)


def exchanges_in_memory() -> bool:
    """Return whether `SharedExchange` serves here: native code does it."""
    return native_library() is not None


class SharedExchange:
    """One process's end of a memory that some share; all do the same with it, in the same order.

    Args:
        memory: As many bytes as `num_bytes` says, at first zero.
        rank: Place of this process.
        size: How many there are.
        on_wait: Called now and then while another process is waited for, with its rank and the
            seconds so far; what it raises ends the wait, and is raised by the method that waits.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, on_wait: Callable[[int, float], None]
    ) -> None:
        library = native_library()
        if library is None:
            raise RuntimeError("shared_exchange: no native code serves here")
        if len(memory) != self.num_bytes(size):
            raise ValueError(
                f"shared_exchange: memory has {len(memory)} bytes but must have "
                f"{self.num_bytes(size)}"
            )
        # Nothing here refers to this object, so that the memory goes when nobody has it any more.
        errors: list[BaseException] = []

        def gives_up(peer: int, waited_s: float) -> int:
            try:
                on_wait(peer, waited_s)
            except BaseException as error:  # nothing can be raised through native code
                errors.append(error)
            return len(errors)

        self._library, self._errors = library, errors
        self._memory = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(self._memory)
        self.native = NativeExchange(start, rank, size, _GIVES_UP(gives_up))
        """For native code that sums by itself; `raise_failure` if it stops."""

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return how much memory so many processes share."""
        return size * (_LINE_BYTES + 2 * PIECE_BYTES)

    @property
    def sent_bytes(self) -> int:
        """What this process has written for each of the others in sums since the start."""
        return int(self.native.sent_bytes)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace each process's tensor by `sum_in_order_reference` of all, in the order of ranks.

        Args:
            tensor: Contiguous, mutated; of one shape and dtype in all processes.
        """
        check_tensor("shared_exchange: tensor", tensor, (None,) * tensor.ndim, packed=tensor.ndim)
        stopped = self._library.octavo_shared_sum(
            element_code(tensor.dtype),
            ctypes.byref(self.native),
            tensor.data_ptr(),
            tensor.numel(),
        )
        if stopped:
            self.raise_failure()

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all processes, in the order of ranks, on rank 0; nothing elsewhere.

        Args:
            part: Contiguous; of one shape and dtype in all processes.
        """
        out = None
        if self.native.rank == 0:
            out = part.new_empty((self.native.size, *part.shape))
        stopped = self._library.octavo_shared_gather(
            ctypes.byref(self.native),
            part.data_ptr(),
            None if out is None else out.data_ptr(),
            part.nbytes,
        )
        if stopped:
            self.raise_failure()
        return [] if out is None else list(out)

    def raise_failure(self) -> NoReturn:
        """Raise what `on_wait` raised; the memory is of no use any more."""
        raise self._errors[0]
