"""From the files of adapters to what they add to a part's linear layers.

Adapters lie side by side in slots, so that any of those in memory may be in any step. Knows nothing
of requests, or of who gets a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import mul
from types import MappingProxyType

import torch

from octavo.adapter import Adapter, AdapterLoad
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError
from octavo.host_resources import host_memory
from octavo.model import tensor_names as names
from octavo.model.blocks import GatedMlp
from octavo.model.layer_weights import LayerWeights
from octavo.model.layers import PackedLinear
from octavo.model.lora import LowRank, LowRanks
from octavo.model.lora_files import LoraFiles
from octavo.model.lora_list import ListedAdapter, Shapes, survey_adapters
from octavo.model.shard import WHOLE, ModelPart
from octavo.model.spec import ModelSpec

logger = logging.getLogger(__name__)

#: Ranks that the widest instructions multiply at once.
_VECTOR = 16


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

    def rank_of(self, adapter: ListedAdapter) -> int:
        """Return the rank of what an adapter adds to all of them; 0 for nothing."""
        return sum(adapter.ranks.get(module, 0) for module in self.modules)

    def packed_numbers(self, adapter: ListedAdapter) -> int:
        """Return how many numbers native code keeps of an adapter: whole vectors of ranks."""
        ranks = -(-self.rank_of(adapter) // _VECTOR) * _VECTOR
        up: int = sum(
            adapter.ranks.get(name, 0) * (rows.stop - rows.start) for name, rows in self.rows
        )
        return ranks * self.linear.in_features + up


class AdapterMemory:
    """The adapters of a model, and the slots of those that are in memory; of none by default.

    Args:
        listed: all adapters.
        num_slots: how many are in memory at once.
        layers: linear layers that some adapter changes, with what those in memory add to them.
        shapes: (out, in) of each linear layer of the model that can be adapted, by name.
    """

    def __init__(
        self,
        listed: Sequence[ListedAdapter] = (),
        num_slots: int = 0,
        layers: Sequence[tuple[_Joined, LowRank]] = (),
        shapes: Shapes = MappingProxyType({}),
    ) -> None:
        self.named: Mapping[str, Adapter] = {
            each.name: Adapter(number, each.version) for number, each in enumerate(listed)
        }
        self.num_slots = num_slots
        self.low_ranks: LowRanks = {joined.linear: low_rank for joined, low_rank in layers}
        """What the adapters in memory add to the part's layers, a group for each slot."""
        self._listed = listed
        self._layers = layers
        self._shapes = shapes

    def read(self, load: AdapterLoad) -> None:
        """Read an adapter into a slot, mutating that alone; steps may use other slots meanwhile.

        Raises:
            EngineError: its files are gone, or not what they were when it was listed.
        """
        listed = self._listed[load.number]
        try:
            files = LoraFiles(listed.directory, self._shapes, max(listed.ranks.values()))
        except ConfigError as error:
            logger.warning("adapter %r cannot be read any more: %s", listed.name, error)
            files = None
        if files is None or files.version != listed.version:
            raise EngineError(
                f"the files of adapter {listed.name!r} are gone or have changed since the model "
                "was loaded; load the model again"
            )
        for joined, low_rank in self._layers:
            _fill(joined, files, low_rank, load.slot)


def list_adapters(config: EngineConfig, spec: ModelSpec) -> tuple[ListedAdapter, ...]:
    """Read and check all adapters that an engine is configured for; none of its model's weights.

    Args:
        config: the options.
        spec: of the whole model.

    Raises:
        ConfigError: the list cannot be used, or an adapter does not fit the model; names it.
    """
    if not config.enable_lora:
        return ()
    return survey_adapters(config, adaptable_layers(ModelPart.of(spec, WHOLE)))


def read_adapters(
    config: EngineConfig,
    listed: Sequence[ListedAdapter],
    part: ModelPart,
    layers: Sequence[LayerWeights],
    device: torch.device,
) -> AdapterMemory:
    """Read as many adapters as have a slot.

    Args:
        config: the options.
        listed: what `list_adapters` returned.
        part: what is held of the model.
        layers: the part's own.
        device: theirs.

    Raises:
        ConfigError: the slots do not fit the memory.
        EngineError: an adapter has changed meanwhile.
    """
    if not config.enable_lora:
        return AdapterMemory()
    num_slots = min(len(listed), config.max_loras or len(listed))
    joined = [each for index, layer in enumerate(layers) for each in _joined(part, index, layer)]
    ranks = [max(map(each.rank_of, listed), default=0) for each in joined]
    num_bytes = _most_bytes(joined, listed, num_slots, device)
    check_fits(num_slots, num_bytes, _free_bytes(device))
    logger.info(
        "%d of %d adapters in memory, about %.1f MiB", num_slots, len(listed), num_bytes / 2**20
    )
    slots = [
        (each, LowRank(each.linear, num_slots, rank, device))
        for each, rank in zip(joined, ranks, strict=True)
        if rank
    ]
    memory = AdapterMemory(listed, num_slots, slots, adaptable_layers(part))
    for number in range(num_slots):
        memory.read(AdapterLoad(number, slot=number))
    return memory


def adaptable_layers(part: ModelPart) -> dict[str, tuple[int, int]]:
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


def _most_bytes(
    joined: Sequence[_Joined],
    listed: Sequence[ListedAdapter],
    num_slots: int,
    device: torch.device,
) -> int:
    """Return about what so many adapters take at most: on a CPU each has memory of its own size."""
    if device.type == "cpu":
        numbers = [sum(each.packed_numbers(adapter) for each in joined) for adapter in listed]
    else:
        sizes = [each.linear.in_features + each.linear.out_features for each in joined]
        ranks = [max(map(each.rank_of, listed), default=0) for each in joined]
        numbers = [sum(map(mul, ranks, sizes))] * num_slots
    return sum(nlargest(num_slots, numbers)) * torch.float32.itemsize


def _free_bytes(device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory().free.amount


def check_fits(num_slots: int, num_bytes: int, free_bytes: int) -> None:
    """Raise ConfigError if there is less memory free than so many adapters take at once."""
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{num_slots:,} adapters take {num_bytes:,} bytes but only {free_bytes:,} are free; "
            "lower max_loras, or list adapters of smaller ranks"
        )


def _fill(joined: _Joined, files: LoraFiles, low_rank: LowRank, slot: int) -> None:
    """Write what an adapter adds to some joined layers into its slot.

    modules   q │ k │ v            up    q  0  0
    down      q over k over v            0  k  0
                                         0  0  v
    """
    pairs = {module: files.pair(module) for module in joined.modules if files.rank_of(module)}
    down = torch.zeros(sum(len(pair.down) for pair in pairs.values()), joined.linear.in_features)
    up = torch.zeros(joined.linear.out_features, len(down))
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
