"""What a check found: figures and reasons, and how they are shown to people.

Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from octavo.model.quantization import weights_text

_GAP = 2
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class AdapterVerdict:
    """What an adapter takes in memory, or why it is refused."""

    name: str
    num_bytes: int | None
    """In float32; None where it is refused."""
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class FeatureOff:
    """Something that Octavo does for other models or on other devices, and not here."""

    feature: str
    reason: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model takes, and what there is room for; of several ranks, of the one with the most.

    Where a figure is None, only a load finds it out.
    """

    file_bytes: int
    """Of the weights as they are stored."""
    weight_bytes: int
    """Of the weights as they are held, but for the padding of packed ones."""
    kv_bytes_per_token: int | None
    row_bytes: int
    """Of a sequence, whatever its length."""
    num_blocks: int | None
    """The least of all ranks; on a GPU before what steps take, which a load measures."""
    blocks_per_sequence: int
    """Of a sequence of `max_model_len` tokens that decodes."""

    @property
    def num_sequences(self) -> int | None:
        """Sequences of `max_model_len` tokens that blocks hold at once."""
        return None if self.num_blocks is None else self.num_blocks // self.blocks_per_sequence


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What serving a model with some options takes."""

    model: str
    architecture: str
    tier: str
    """`native`, `transformers` or `static`."""
    reason: str
    """Why in no faster way."""
    dtype: str
    quantization: str
    device: str
    num_ranks: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    block_size: int
    max_num_seqs: int
    memory: Memory
    off: tuple[FeatureOff, ...]
    adapters: tuple[AdapterVerdict, ...] = ()
    """All of the list; with one that is refused, the model is not served."""

    @property
    def refused_adapters(self) -> tuple[str, ...]:
        """Names of those for which a load fails."""
        return tuple(each.name for each in self.adapters if each.refusal is not None)


class ReportView:
    """A report as a table for a terminal, or as plain lines for whoever reads them elsewhere."""

    def __init__(self, report: ModelReport) -> None:
        self._report = report

    def lines(self) -> Iterator[str]:
        """Yield a line for each figure and each feature that is off, however long it is."""
        for rows in (list(self._rows()), list(self._off())):
            width = max((len(name) for name, _ in rows), default=0) + _GAP
            yield from (f"{name:<{width}}{text}" for name, text in rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for rows in (self._rows(), self._off()):
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
            for name, text in rows:
                table.add_row(Text(name), Text(text))
            yield table

    def _rows(self) -> Iterator[tuple[str, str]]:
        report = self._report
        yield "model", f"{report.model}, {report.architecture}"
        yield "served", f"{report.tier}: {report.reason}"
        yield "device", f"{report.device}{_each(report.num_ranks)}"
        yield "dtype", weights_text(report.dtype, report.quantization)
        yield from self._memory()
        for adapter in report.adapters:
            yield f"adapter {adapter.name}", _verdict(adapter)

    def _memory(self) -> Iterator[tuple[str, str]]:
        report, memory = self._report, self._report.memory
        stored = f"; {_mib(memory.file_bytes)} in files" if memory.file_bytes else ""
        yield "weights", f"{memory.weight_bytes:,} bytes ({_mib(memory.weight_bytes)}){stored}"
        if memory.kv_bytes_per_token is None or memory.num_blocks is None:
            yield "KV", "measured when it is loaded"
            return
        row = f", and {memory.row_bytes:,} a sequence" if memory.row_bytes else ""
        yield "KV", f"{memory.kv_bytes_per_token:,} bytes a token{row}"
        block_bytes = memory.kv_bytes_per_token * report.block_size
        size = _mib(memory.num_blocks * block_bytes)
        yield "blocks", f"{memory.num_blocks:,} of {report.block_size} tokens, {size}"
        yield "sequences", self._sequences(memory.num_blocks)

    def _sequences(self, num_blocks: int) -> str:
        report, count = self._report, self._report.memory.num_sequences
        length = f"{report.max_model_len:,} tokens"
        if not count:
            return f"none of {length}: all blocks hold {num_blocks * report.block_size:,} tokens"
        return f"{count:,} of {length} at once; option max_num_seqs lets {report.max_num_seqs} run"

    def _off(self) -> Iterator[tuple[str, str]]:
        for each in self._report.off:
            yield f"off: {each.feature}", each.reason


def _verdict(adapter: AdapterVerdict) -> str:
    if adapter.num_bytes is None:
        return f"refused: {adapter.refusal}"
    return f"{adapter.num_bytes:,} bytes"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"


def _each(num_ranks: int) -> str:
    return "" if num_ranks == 1 else f", {num_ranks} ranks; figures are of the one with the most"
