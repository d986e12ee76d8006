"""A step's inputs, from the host arrays that a builder fills to where the device reads them.

Token ids that the host does not know yet are filled in on the way, from what the step before has
drawn. Knows nothing of the model or of what is done with the inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from octavo.executor.batch import BatchInputs
from octavo.executor.block_transfers import Event, Stream
from octavo.model.adapted_rows import AdaptedRows

#: Where a field may begin, in bytes: what copies and kernels like best, and the same for every
#: step, for a kernel is compiled anew for pointers that are aligned otherwise.
_ALIGNMENT = 128

#: Host buffers in rotation: one is filled while the copy of the other may be under way.
_NUM_STAGES = 2


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most that one step holds."""

    max_num_seqs: int
    """Sequences, and rows of logits."""
    max_num_tokens: int
    max_model_len: int
    """Tokens of one sequence."""
    block_size: int
    num_adapter_slots: int = 0
    """Adapters in memory at once."""

    @property
    def max_blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.max_model_len // self.block_size)


class DeviceInputs(Protocol):
    """The way of a step's inputs to its device."""

    def put(self, inputs: BatchInputs, drawn: torch.Tensor | None) -> BatchInputs:
        """Return the inputs of a step on its device, with pending token ids filled in.

        The host does not wait for the step before.

        Args:
            inputs: on the host; may be overwritten as soon as the step has been launched.
            drawn: [rows] int64 on the device, what the step before drew; only read for pending
                tokens.

        Returns:
            Inputs that hold until the next call, for work that the device is given before it.
        """


class HostInputs:
    """Leave the inputs where they are, for a device whose memory is the host's."""

    def put(self, inputs: BatchInputs, drawn: torch.Tensor | None) -> BatchInputs:
        """Return `inputs` itself, whose pending token ids are filled in; see DeviceInputs."""
        _fill_in(inputs, drawn)
        return inputs


class StagedInputs:
    """Send each step's inputs by one copy, which the host does not wait for.

        host     │ stage 0: step k │          │ stage 1: step k + 1 │     in rotation
                          └── copy ──▶                   └── copy ──▶
        device            │ step k │ pending, forward ... │ step k + 1 │ pending, forward ...

    The fields lie behind each other, those whose size varies among steps of as many tokens,
    sequences and rows of logits last: all but `pending`, the block tables and adapted rows lie at
    the same addresses in any two such steps. So work recorded for one reads the inputs of the
    other, if it reads no adapted rows.

    Args:
        sizes: the most that a step holds.
        device: where forward passes run.
        stream: the stream that they run on, which must be the current one when `put` is called.
        copy: copies from its second argument, on the host, to its first, on the device, in the
            order of the stream.
    """

    def __init__(
        self,
        sizes: StepSizes,
        device: torch.device,
        *,
        stream: Stream,
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        self.sizes = sizes
        num_bytes = _most_bytes(sizes)
        pinned = device.type == "cuda"
        self._stages = deque(
            _Stage(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))
            for _ in range(_NUM_STAGES)
        )
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._stream = stream
        self._copy = copy

    @classmethod
    def on_cuda(cls, sizes: StepSizes, device: torch.device) -> Self:
        """Return inputs for the current stream of a CUDA device."""
        return cls(
            sizes,
            device,
            stream=torch.cuda.current_stream(device),
            copy=lambda target, source: target.copy_(source, non_blocking=True),
        )

    @torch.inference_mode()
    def put(self, inputs: BatchInputs, drawn: torch.Tensor | None) -> BatchInputs:
        """Queue the copy of a step's inputs, and the filling in; see DeviceInputs.

        `inputs` may be overwritten on return.
        """
        stage = self._stages[0]
        self._stages.rotate(1)
        if stage.copied is not None:
            stage.copied.synchronize()
        fields, end = [], 0
        for field in _fields(inputs):
            begin = _aligned(end)
            end = begin + field.nbytes
            _like(field, stage.host[begin:end]).copy_(field)
            fields.append(_like(field, self._device[begin:end]))
        self._copy(self._device[:end], stage.host[:end])
        stage.copied = self._stream.record_event()
        placed = _with_fields(inputs, fields)
        _fill_in(placed, drawn)
        return placed


@dataclass(slots=True)
class _Stage:
    """A host buffer, and the mark behind the last copy out of it."""

    host: torch.Tensor
    copied: Event | None = None


def _fields(inputs: BatchInputs) -> list[torch.Tensor]:
    """Return the tensors of a step in the order in which they lie, as `_with_fields` takes them."""
    attention = inputs.attention
    fields = [
        inputs.token_ids,
        inputs.positions,
        attention.slot_mapping,
        inputs.logits_rows,
        attention.query_start_loc,
        attention.seq_lens,
        inputs.pending,
        attention.block_tables,
    ]
    adapted = inputs.adapted
    return fields if adapted is None else [*fields, adapted.rows, adapted.starts]


def _with_fields(inputs: BatchInputs, fields: list[torch.Tensor]) -> BatchInputs:
    token_ids, positions, slots, logits_rows, starts, seq_lens, pending, tables, *adapted = fields
    attention = replace(
        inputs.attention,
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=tables,
    )
    return replace(
        inputs,
        token_ids=token_ids,
        positions=positions,
        logits_rows=logits_rows,
        pending=pending,
        attention=attention,
        adapted=AdaptedRows(*adapted) if adapted else None,
    )


def _most_bytes(sizes: StepSizes) -> int:
    num_seqs, num_tokens = sizes.max_num_seqs, sizes.max_num_tokens
    int64, int32 = torch.int64.itemsize, torch.int32.itemsize
    fields = (
        *[num_tokens * int64] * 3,
        num_seqs * int64,
        (num_seqs + 1) * int32,
        num_seqs * int32,
        num_seqs * 2 * int64,
        num_seqs * sizes.max_blocks * int32,
        num_tokens * int64,
        (sizes.num_adapter_slots + 1) * int64,
    )
    return sum(map(_aligned, fields))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _like(field: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return bytes as a tensor of the dtype and shape of `field`."""
    return memory.view(field.dtype).view(field.shape)


def _fill_in(inputs: BatchInputs, drawn: torch.Tensor | None) -> None:
    """Write the pending token ids, in the order of the device's work."""
    pending = inputs.pending
    if len(pending):
        assert drawn is not None, f"{len(pending)} token ids are pending but no step drew any"
        # Rows by number, not by a mask: the device would have to tell how many a mask has. -1 says
        # that nothing could be drawn; until that sequence is ended, any token will do.
        inputs.token_ids[pending[:, 0]] = drawn[pending[:, 1]].clamp(min=0)
