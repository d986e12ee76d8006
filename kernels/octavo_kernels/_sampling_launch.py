"""How the kernels on logits are launched: tables by architecture, and functions that read them.

As in _launch, a choice never depends on how many rows a step has. Knows neither torch nor the
Triton language.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_kernels._launch import Architecture, PiecesConfig, for_capability


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """A program draws the token of one row, piece by piece."""

    block_size: int
    """Logits of a piece, and the largest k that top-k finds without reading whole rows again."""
    max_listed: int
    """Tokens that are listed at most, to be filtered apart from the row; a multiple of
    block_size."""
    num_warps: int


# By the oldest architecture an entry serves. Not measured on a device yet: a row is read by one
# program, which needs many threads to have many loads under way, each of 16 bytes.
_ROW_SCAN: Mapping[Architecture, PiecesConfig] = {80: PiecesConfig(block_size=4096, num_warps=16)}
_SAMPLE: Mapping[Architecture, SampleConfig] = {
    80: SampleConfig(block_size=2048, max_listed=4096, num_warps=16)
}
_PENALTIES: Mapping[Architecture, PiecesConfig] = {80: PiecesConfig(block_size=512, num_warps=4)}
_BITMASK: Mapping[Architecture, PiecesConfig] = {80: PiecesConfig(block_size=1024, num_warps=4)}


def choose_row_scan(capability: Architecture) -> PiecesConfig:
    """Choose how a row is read once or twice by one program."""
    return for_capability(_ROW_SCAN, capability)


def choose_sample(capability: Architecture) -> SampleConfig:
    """Choose how tokens are drawn."""
    return for_capability(_SAMPLE, capability)


def choose_penalties(capability: Architecture) -> PiecesConfig:
    """Choose how a row's tokens are penalised."""
    return for_capability(_PENALTIES, capability)


def choose_bitmask(capability: Architecture) -> PiecesConfig:
    """Choose how a row is masked."""
    return for_capability(_BITMASK, capability)
