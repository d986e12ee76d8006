"""How much a batch of transformers' own caches takes, and how many tokens there is memory for.

A cache may be of any kind, so it is measured: two short prompts tell what a row takes however long
it is, and what each token adds. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_storage import kv_memory_bytes
from octavo.host_resources import HostMemory
from octavo.model.pretrained import PretrainedModel
from octavo.scheduler.admission import RESERVE
from octavo.static_engine.module_state import ModuleState, tensors_in

_LENGTHS = (16, 32)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """What a row of a batch takes, in bytes."""

    fixed: int
    """Of its state, whatever its length."""
    per_token: int


@torch.no_grad()
def measure_row(model: PretrainedModel) -> RowBytes:
    """Measure what a row keeps from one step to the next; the model must not have run before."""
    state = ModuleState(model.module)
    few, many = (_kept_bytes(model, length, state) for length in _LENGTHS)
    per_token = max(0, many - few) // (_LENGTHS[1] - _LENGTHS[0])
    return RowBytes(max(0, few - per_token * _LENGTHS[0]), per_token)


def choose_num_blocks(
    config: EngineConfig,
    row: RowBytes,
    row_tokens: int,
    device: torch.device,
    memory: HostMemory,
    reserved_bytes: int = 0,
) -> int:
    """Return how many blocks of `block_size` tokens a batch may reserve over all its rows.

    `num_kv_blocks` decides if given, then the memory as it does for blocks of KV; there are never
    more than `max_num_seqs` rows of `row_tokens` can use.

    Args:
        config: the options.
        row: what a row takes.
        row_tokens: the most that a row may have.
        device: of the model.
        memory: of the host.
        reserved_bytes: free memory of a GPU that weights will take.

    Raises:
        ConfigError: not even one block fits.
    """
    blocks_of_row = -(-row_tokens // config.block_size)
    # Admission leaves a share of all blocks to those who run.
    most = int(config.max_num_seqs * blocks_of_row / (1.0 - RESERVE)) + 2
    if config.num_kv_blocks is not None:
        return min(config.num_kv_blocks, most)
    memory_bytes = kv_memory_bytes(config, device, memory, reserved_bytes)
    rest = memory_bytes - config.max_num_seqs * row.fixed
    needed = row.per_token * config.block_size
    num_blocks = min(most, rest // needed) if needed else most
    if rest < 0 or num_blocks < 1:
        raise ConfigError(
            f"{memory_bytes:,} bytes hold no batch of {config.max_num_seqs} rows of "
            f"{row.fixed:,} bytes and {needed:,} for a block of tokens; raise "
            "kv_cache_memory_bytes or lower max_num_seqs"
        )
    return num_blocks


def _kept_bytes(model: PretrainedModel, num_tokens: int, state: ModuleState) -> int:
    """Return the bytes of what there is after a forward pass, but for the logits."""
    token_ids = torch.ones(1, num_tokens, dtype=torch.int64, device=model.device)
    start = {"decoder_input_ids": token_ids[:, :1]} if model.is_encoder_decoder else {}
    with _noting_caches(model.module) as caches:
        output = model.module(input_ids=token_ids, use_cache=True, **start)
    kept = {key: value for key, value in output.items() if key != "logits"}
    # On the meta device nothing has an address.
    found = [*tensors_in([kept, *caches]), *state.tensors()]
    sizes = {tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in found}
    state.clear()
    return sum(sizes.values())


@contextmanager
def _noting_caches(model: torch.nn.Module) -> Iterator[list[Cache]]:
    """Collect the caches that modules are called with, for not every model returns its own."""
    caches: list[Cache] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (value for value in (*args, *named.values()) if isinstance(value, Cache))
        caches.extend(cache for cache in given if not any(cache is each for each in caches))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        yield caches
    finally:
        for hook in hooks:
            hook.remove()
