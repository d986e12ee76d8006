"""Decode steps as recorded work, which a device replays without being told each part anew.

A decode step, in which every sequence computes one token and draws from it, is padded to one of a
few batch sizes, each recorded once. Knows nothing of sequences, of who schedules them, or of what
the model computes.

What is recorded is frozen: addresses, and every number that the host passed along. So inputs are
put where they lay when the work was recorded, block tables are as wide as the longest sequence's,
and the launch of attention is that for the longest.

Padding rows belong to no sequence and have no slot: they write to no block and read none. What they
compute is left out of the result, and row for row the others compute what they would without them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from octavo.executor.batch import BatchInputs
from octavo.executor.device_inputs import StagedInputs
from octavo.model.interface import CausalModel
from octavo_kernels import AttentionMetadata, KVCache

#: Sizes rise by this many rows: what the matrix instructions of a GPU compute at the least.
_ROWS_APART = 8
#: From here on the gaps grow, to an eighth of the size: padding rows cost time only where products
#: take longer than to read the weights, and each graph takes load time and memory.
_WIDER_FROM = 128

_WARM_UP_RUNS = 2


class Capture(Protocol):
    """Recorded work; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Queue the work as it was recorded, on the current stream."""


class Recorder(Protocol):
    """Maker of captures."""

    def record(self, work: Callable[[], object]) -> Capture:
        """Run `work` until nothing of it is new to the device, then once more to record it.

        `work` must take the same steps each time, on memory that outlives the capture or that it
        makes itself; what it returns is dropped.
        """


class CudaRecorder:
    """Record CUDA graphs, all of them with one pool of memory for what they compute on the way.

    As that memory is shared, only one of the graphs may be under way at a time. The largest should
    be recorded first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    # A graph shares tensors with all others of the device: made here in inference mode, nobody else
    # could write to them.
    @torch.inference_mode(False)
    def record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Record work of the current stream; see Recorder."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread records: what others ask of the device meanwhile is none of its business.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph


class DecodeGraphs:
    """Run decode steps of one model over one KV cache by replaying them.

    Args:
        decoder: a model that is recordable.
        kv_cache: the one that every step reads and writes; mutated by `run` alone.
        inputs: those of every step of the model.
        recorder: of the same device and stream.
    """

    def __init__(
        self,
        decoder: CausalModel[Any],
        kv_cache: KVCache,
        inputs: StagedInputs,
        recorder: Recorder,
    ) -> None:
        sizes, device = inputs.sizes, kv_cache.storage.device
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._inputs = inputs
        self._recorder = recorder
        self._captures: dict[int, Capture] = {}
        self._block_tables = torch.zeros(
            (sizes.max_num_seqs, sizes.max_blocks), dtype=torch.int32, device=device
        )
        self._logits = torch.empty((sizes.max_num_seqs, decoder.spec.vocab_size), device=device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that have been recorded, rising."""
        return tuple(sorted(self._captures))

    @torch.inference_mode()
    def record(self, sizes: Iterable[int]) -> None:
        """Record steps of these batch sizes, the largest first, and run each once."""
        for size in sorted(sizes, reverse=True):
            work = self._work(self._place(pad_decode(_no_tokens(), size), None))
            self._captures[size] = self._recorder.record(work)
            # The first replay takes longer, for it also loads the graph.
            self._captures[size].replay()

    @torch.inference_mode()
    def run(self, inputs: BatchInputs, drawn: torch.Tensor | None) -> torch.Tensor:
        """Run a step for which `is_decode` holds, in the smallest recorded size that holds it.

        Args:
            inputs: on the host; may be overwritten on return.
            drawn: see DeviceInputs.

        Returns:
            logits [num_tokens, vocab_size] float32, overwritten by the next replay.
        """
        num_tokens, sizes = len(inputs.token_ids), self.sizes
        size = sizes[bisect_left(sizes, num_tokens)]
        self._place(pad_decode(inputs, size), drawn)
        self._captures[size].replay()
        return self._logits[:num_tokens]

    def _place(self, padded: BatchInputs, drawn: torch.Tensor | None) -> BatchInputs:
        """Put padded inputs where the graph of their size reads them."""
        inputs = self._inputs.put(padded, drawn)
        num_rows, width = inputs.attention.block_tables.shape
        self._block_tables[:num_rows, :width].copy_(inputs.attention.block_tables)
        return inputs

    def _work(self, placed: BatchInputs) -> Callable[[], torch.Tensor]:
        """Return the step that reads these inputs, whoever puts what there."""
        logits = self._logits[: len(placed.token_ids)]
        metadata = replace(
            placed.attention,
            block_tables=self._block_tables[: len(placed.token_ids)],
            max_seq_len=self._inputs.sizes.max_model_len,
        )

        def work() -> torch.Tensor:
            return self._decoder.forward(
                placed.token_ids,
                placed.positions,
                self._kv_cache,
                metadata,
                placed.logits_rows,
                out=logits,
            )

        return work


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to record, rising: 1, 2, 4, then by 8, further apart from 128 on.

    No step is padded by more than 7 rows or an eighth of its own.
    """
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = _ROWS_APART
    while size < max_num_seqs:
        sizes.append(size)
        size += max(_ROWS_APART, (1 << size.bit_length() - 1) // 8 if size >= _WIDER_FROM else 0)
    return (*sizes, max_num_seqs)


def is_decode(inputs: BatchInputs) -> bool:
    """Say whether every sequence computes one token and draws one from it; `inputs` on the host.

    Only its last row may be drawn from: where each row is, none has another.
    """
    return torch.equal(inputs.logits_rows, torch.arange(len(inputs.token_ids)))


def pad_decode(inputs: BatchInputs, size: int) -> BatchInputs:
    """Return a decode step with rows of no sequence behind its own, `size` rows in all.

    Args:
        inputs: on the host, of at most `size` rows.
        size: rows, of tokens and sequences alike; those added have no slot and length 0.
    """
    num_tokens = len(inputs.token_ids)
    behind = (0, size - num_tokens)
    attention = inputs.attention
    padded = replace(
        attention,
        query_start_loc=F.pad(attention.query_start_loc, behind, value=num_tokens),
        seq_lens=F.pad(attention.seq_lens, behind),
        block_tables=F.pad(attention.block_tables, (0, 0, *behind)),
        slot_mapping=F.pad(attention.slot_mapping, behind, value=-1),
    )
    return replace(
        inputs,
        token_ids=F.pad(inputs.token_ids, behind),
        positions=F.pad(inputs.positions, behind),
        logits_rows=torch.arange(size),
        attention=padded,
    )


def estimate_graph_bytes(
    make_graphs: Callable[[], DecodeGraphs], sizes: tuple[int, ...], free_bytes: Callable[[], int]
) -> int:
    """Return about how much device memory the graphs of these sizes take.

    The two largest are recorded for a trial and dropped: the first brings what all share, the
    second what each adds. Graphs freeze addresses, so those that serve can only be recorded once
    the KV cache has its memory, and that is given what is left.

    Args:
        make_graphs: makes them over any cache.
        sizes: rising.
        free_bytes: says how much device memory is free.
    """
    before = free_bytes()
    graphs = make_graphs()
    graphs.record(sizes[-1:])
    after_first = free_bytes()
    graphs.record(sizes[-2:-1])
    each = max(0, after_first - free_bytes())
    return max(0, before - after_first) + each * (len(sizes) - 1)


def _no_tokens() -> BatchInputs:
    def none(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    attention = AttentionMetadata(
        query_start_loc=none(1, dtype=torch.int32),
        seq_lens=none(0, dtype=torch.int32),
        block_tables=none(0, 1, dtype=torch.int32),
        slot_mapping=none(0),
        max_query_len=1,
        max_seq_len=0,
    )
    return BatchInputs(none(0), none(0), none(0), none(0, 2), attention)
