"""From the files of adapters to what they add to a part's linear layers.

All adapters are held at once, side by side, so that any of them may be in any step: none is ever
waited for. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from octavo.adapter import Adapter
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host_resources import host_memory
from octavo.model import tensor_names as names
from octavo.model.blocks import GatedMlp
from octavo.model.layer_weights import LayerWeights
from octavo.model.layers import PackedLinear
from octavo.model.lora import LowRank, LowRanks
from octavo.model.lora_files import LoraFiles, adapter_directories
from octavo.model.shard import ModelPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters of a model; none by default."""

    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """By name."""
    low_ranks: LowRanks = field(default_factory=dict)
    """What they add to the part's layers."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """Linear layers of a checkpoint that a part has as one."""

    linear: PackedLinear
    rows: names.Rows
    columns: slice

    @property
    def modules(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.rows))

    def rank_of(self, files: LoraFiles) -> int:
        """Return the rank of what an adapter adds to all of them; 0 for nothing."""
        return sum(map(files.rank_of, self.modules))


def read_adapters(
    config: EngineConfig,
    part: ModelPart,
    layers: Sequence[LayerWeights],
    device: torch.device,
) -> LoadedAdapters:
    """Read the adapters that an engine is configured for.

    Args:
        config: the options.
        part: what is held of the model.
        layers: the part's own.
        device: theirs.

    Raises:
        ConfigError: an adapter does not fit the model, or all do not fit the memory.
    """
    if not config.enable_lora:
        return LoadedAdapters()
    all_files = _open_all(config, part)
    joined = [each for index, layer in enumerate(layers) for each in _joined(part, index, layer)]
    ranks = [
        max((each.rank_of(files) for files in all_files.values()), default=0) for each in joined
    ]
    bytes_each = _bytes_of_each(joined, ranks)
    check_fits(len(all_files), bytes_each, _free_bytes(device))
    logger.info("%d adapters, %.1f MiB each", len(all_files), bytes_each / 2**20)
    low_ranks = {
        each.linear: _read(each, rank, list(all_files.values()), device)
        for each, rank in zip(joined, ranks, strict=True)
        if rank
    }
    adapters = {
        name: Adapter(slot, files.version) for slot, (name, files) in enumerate(all_files.items())
    }
    return LoadedAdapters(adapters, low_ranks)


def _open_all(config: EngineConfig, part: ModelPart) -> dict[str, LoraFiles]:
    """Return the files of each adapter, checked, by name."""
    shapes = _adaptable(part)
    all_files = {}
    for name, directory in adapter_directories(config).items():
        try:
            all_files[name] = LoraFiles(directory, shapes, config.max_lora_rank)
        except ConfigError as error:
            raise ConfigError(f"adapter {name!r}: {error}") from None
    return all_files


def _adaptable(part: ModelPart) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the whole model's linear layers that an adapter may change, by name."""
    shapes = names.expected_tensors(part.whole)
    found = {}
    for index in range(part.whole.num_layers):
        prefix = names.layer_prefix(index)
        rows = (*names.qkv_rows(part, prefix), *names.gate_up_rows(part, prefix))
        for name in (*(name for name, _ in rows), f"{prefix}{names.OUT}", f"{prefix}{names.DOWN}"):
            shape = shapes.get(f"{name}.weight")
            if shape is not None:
                found[name] = (shape[0], shape[1])
    return found


def _joined(part: ModelPart, index: int, layer: LayerWeights) -> Iterator[_Joined]:
    """Yield the linear layers of layer `index` of the part."""
    prefix = names.layer_prefix(part.layers[index])
    heads, inner = names.span(part.heads, part.spec.head_dim), names.span(part.inner)
    every = names.span(range(part.spec.hidden_size))
    attention, mlp = layer.attention, layer.mlp
    yield _Joined(attention.qkv, names.qkv_rows(part, prefix), names.ALL)
    yield _Joined(attention.o, [(f"{prefix}{names.OUT}", every)], heads)
    if isinstance(mlp, GatedMlp):
        yield _Joined(mlp.gate_up, names.gate_up_rows(part, prefix), names.ALL)
        yield _Joined(mlp.down, [(f"{prefix}{names.DOWN}", every)], inner)


def _bytes_of_each(joined: Sequence[_Joined], ranks: Sequence[int]) -> int:
    sizes = [each.linear.in_features + each.linear.out_features for each in joined]
    numbers = sum(rank * size for rank, size in zip(ranks, sizes, strict=True))
    return numbers * torch.float32.itemsize


def _free_bytes(device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory().free.amount


def check_fits(num_adapters: int, bytes_each: int, free_bytes: int) -> None:
    """Raise ConfigError if there is less memory free than all adapters take."""
    if num_adapters * bytes_each > free_bytes:
        raise ConfigError(
            f"{num_adapters:,} adapters take {num_adapters * bytes_each:,} bytes but only "
            f"{free_bytes:,} are free; list fewer of them, or some of smaller ranks"
        )


def _read(joined: _Joined, rank: int, all_files: list[LoraFiles], device: torch.device) -> LowRank:
    """Read what all adapters add to some joined layers; `rank` is the largest of theirs."""
    low_rank = LowRank(joined.linear, len(all_files), rank, device)
    for slot, files in enumerate(all_files):
        _fill(joined, files, low_rank, slot)
    return low_rank


def _fill(joined: _Joined, files: LoraFiles, low_rank: LowRank, slot: int) -> None:
    """Write what an adapter adds to some joined layers into its slot.

    modules   q │ k │ v            up    q  0  0
    down      q over k over v            0  k  0
                                         0  0  v
    """
    rank = joined.rank_of(files)
    down = torch.zeros(rank, joined.linear.in_features)
    up = torch.zeros(joined.linear.out_features, rank)
    pairs = {module: files.pair(module) for module in joined.modules if files.rank_of(module)}
    places, first = {}, 0
    for module, pair in pairs.items():
        places[module] = slice(first, first + len(pair.down))
        down[places[module]] = pair.down[:, joined.columns]
        first += len(pair.down)
    first = 0
    for module, rows in joined.rows:
        end = first + rows.stop - rows.start
        if module in pairs:
            up[first:end, places[module]] = pairs[module].up[rows]
        first = end
    low_rank.fill(slot, down, up)
