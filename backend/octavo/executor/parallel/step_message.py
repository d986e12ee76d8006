"""What the ranks of a model are told of each step: only what has changed since they last heard.

Rank zero has the sequences. Every rank keeps a mirror of those that run, with the token ids and the
blocks that steps have needed so far, and builds its own inputs from it. Knows nothing of how
messages travel.

    message   [how many of each part] forgotten │ scheduled │ swap_out │ copies │ swap_in │ scored
              │ loads
    scheduled  handle, slot of the adapter or -1, computed, count, draws, new tokens, new blocks,
               is table new, tokens, blocks
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from octavo.adapter import AdapterLoad
from octavo.cache.block_copies import BlockCopies, BlockPair, SwapIn
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence

_INT32 = "i"
_MIRRORED = Request("mirrored", (), SamplingParams())


@dataclass(frozen=True, slots=True)
class MirroredStep:
    """A step as a rank without sequences of its own knows it."""

    scheduled: SchedulerOutput
    """Sequences know their tokens and blocks up to the end of the step, and nothing else."""
    scored_rows: tuple[int, ...]
    """Rows of the step that say how likely tokens of prompts are."""


@dataclass(slots=True)
class _Told:
    """What mirrors know of a sequence."""

    handle: int
    num_tokens: int
    table: list[int]
    num_blocks: int


class StepTeller:
    """Says what has changed, in the order in which steps are planned.

    Args:
        block_size: tokens of a block.
        max_known: sequences that mirrors remember, at least as many as one step has; so nobody has
            to say which have ended.
    """

    def __init__(self, block_size: int, max_known: int) -> None:
        self._block_size = block_size
        self._told: dict[Sequence, _Told] = {}
        self._free_handles = list(range(max_known))

    def tell(self, output: SchedulerOutput) -> bytes:
        """Return the message of a step, to be called before its sequences change."""
        forgotten = self._make_room(output)
        copies = output.copies
        parts = (
            forgotten,
            [number for item in output.scheduled for number in self._share(item)],
            list(chain.from_iterable(copies.swap_out)),
            list(chain.from_iterable(copies.copies)),
            [number for swap_in in copies.swap_in for number in _flat(swap_in)],
            [number for _, row, ids in output.scored for number in (row, len(ids))],
            list(chain.from_iterable(output.loads)),
        )
        return array(_INT32, chain(map(len, parts), *parts)).tobytes()

    def _make_room(self, output: SchedulerOutput) -> list[int]:
        """Forget all who are not in a step if there are too many; return their handles."""
        planned = {item.sequence for item in output.scheduled}
        if len(planned - self._told.keys()) <= len(self._free_handles):
            return []
        forgotten = [self._told.pop(each).handle for each in self._told.keys() - planned]
        self._free_handles += forgotten
        return forgotten

    def _share(self, item: ScheduledSequence) -> list[int]:
        sequence, count, draws = item
        told = self._told.get(sequence)
        if told is None:
            told = _Told(self._free_handles.pop(), 0, sequence.block_table, 0)
            self._told[sequence] = told
        end = sequence.num_computed_tokens + count
        table = sequence.block_table
        is_table_new = table is not told.table
        if is_table_new:
            told.table, told.num_blocks = table, 0
        token_ids = sequence.token_ids[told.num_tokens : end]
        blocks = table[told.num_blocks : -(-end // self._block_size)]
        told.num_tokens += len(token_ids)
        told.num_blocks += len(blocks)
        head = (told.handle, sequence.lora_slot, end - count, count, len(draws))
        return [*head, len(token_ids), len(blocks), is_table_new, *token_ids, *blocks]


class StepMirror:
    """Takes in the messages of a teller, all of them and in order."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def hear(self, message: bytes) -> MirroredStep:
        """Return the step that a message tells of, which holds until the next one is heard."""
        numbers = array(_INT32)
        numbers.frombytes(message)
        rest = iter(numbers)
        forgotten, scheduled, swap_out, copies, swap_in, scored, loads = [
            iter(list(islice(rest, length))) for length in _lengths(rest)
        ]
        for handle in forgotten:
            del self._sequences[handle]
        output = SchedulerOutput(
            tuple(self._shares(scheduled)),
            copies=BlockCopies(_pairs(swap_out), _pairs(copies), tuple(_swap_ins(swap_in))),
            loads=tuple(AdapterLoad(*pair) for pair in _pairs(loads)),
        )
        rows = chain.from_iterable(range(row, row + count) for row, count in _pairs(scored))
        return MirroredStep(output, tuple(rows))

    def _shares(self, rest: Iterator[int]) -> Iterator[ScheduledSequence]:
        for handle, slot in zip(rest, rest, strict=False):
            num_computed, count, num_draws, num_tokens, num_blocks, is_table_new = islice(rest, 6)
            sequence = self._sequences.get(handle)
            if sequence is None:
                sequence = self._sequences[handle] = Sequence(_MIRRORED)
                sequence.lora_slot = slot
            sequence.num_computed_tokens = num_computed
            sequence.token_ids.extend(islice(rest, num_tokens))
            if is_table_new:
                sequence.block_table = []
            sequence.block_table.extend(islice(rest, num_blocks))
            yield ScheduledSequence(sequence, count, (sequence,) * num_draws)


def _lengths(rest: Iterator[int]) -> list[int]:
    return list(islice(rest, 7))


def _flat(swap_in: SwapIn) -> list[int]:
    return [swap_in.transfer_id, len(swap_in.pairs), *chain.from_iterable(swap_in.pairs)]


def _swap_ins(rest: Iterator[int]) -> Iterator[SwapIn]:
    for transfer_id, count in zip(rest, rest, strict=False):
        yield SwapIn(transfer_id, _pairs(islice(rest, 2 * count)))


def _pairs(numbers: Iterator[int]) -> tuple[BlockPair, ...]:
    return tuple(zip(numbers, numbers, strict=True))
