"""Which part of a model one rank of several holds.

A rank belongs to one pipeline stage, which holds some of the layers, and is one of the tensor group
that shares the stage: each of the group holds some heads and some inner columns of every layer, and
some of the vocabulary. Knows the numbers of a model, and nothing of processes or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from octavo.errors import ConfigError
from octavo.model.spec import ExpertSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One place in a grid of pipeline stages and tensor groups; by default, all of it.

    With 2 stages of 2, ranks lie as below. Rank 0, which samples, is the first of the last stage,
    so logits never travel from stage to stage.

        stage 0   rank 2   rank 3      the embedding and the first layers
        stage 1   rank 0   rank 1      the other layers and the vocabulary projection
    """

    tp_rank: int = 0
    """Place in the tensor group."""
    tp_size: int = 1
    pp_stage: int = 0
    pp_size: int = 1

    @classmethod
    def of(cls, rank: int, tp_size: int, pp_size: int) -> Shard:
        """Return the place of a rank; there are tp_size * pp_size of them."""
        return cls(rank % tp_size, tp_size, pp_size - 1 - rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        """Number among all ranks."""
        return (self.pp_size - 1 - self.pp_stage) * self.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether token ids are embedded here."""
        return self.pp_stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether logits are made here."""
        return self.pp_stage == self.pp_size - 1

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (tensor part {self.tp_rank} of {self.tp_size}, "
            f"stage {self.pp_stage} of {self.pp_size})"
        )


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one rank holds of a model, as ranges of the whole; parts differ by one at most.

    A rank has the KV heads that its query heads attend to. Where there are fewer of them than
    ranks, several ranks have the same one.

        heads         0 1 2 3 │ 4 5 6 7 │ 8 9 10 11        of 12, over 3 KV heads
        tp_size 2     0       │ 1                          KV heads 0 │ 1 2
        tp_size 6     0    1  │ 2    3  │ 4    5           KV heads 0 │ 0 │ 1 │ 1 │ 2 │ 2
    """

    shard: Shard
    whole: ModelSpec
    spec: ModelSpec
    """The whole model's, but for what the part has fewer of: layers, heads, inner columns."""
    layers: range
    heads: range
    kv_heads: range
    inner: range
    """Outputs of gate and up, which are the inputs of down."""
    expert_inner: range
    """The same of each expert; empty where there are none."""
    tokens: range
    """Rows of the embedding and of the vocabulary projection."""

    @property
    def adds_keys(self) -> bool:
        """Whether sums over the group have its keys from here: the first rank that has them."""
        group = self.whole.num_heads // self.whole.num_kv_heads
        return self.heads.start == self.kv_heads.start * group

    @classmethod
    def of(cls, spec: ModelSpec, shard: Shard) -> ModelPart:
        """Return a rank's part of a model.

        Raises:
            ConfigError: the model cannot be divided into so many parts.
        """
        _check(spec, shard)
        layers = _layers(spec.num_layers, shard)
        heads, kv_heads = _heads(spec, shard)
        inner = divide(spec.intermediate_size, shard.tp_size)[shard.tp_rank]
        experts, expert_inner = _experts(spec, shard, layers)
        part = replace(
            spec,
            num_layers=len(layers),
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(inner),
            ropes=spec.ropes[layers.start : layers.stop],
            windows=spec.windows[layers.start : layers.stop],
            experts=experts,
        )
        tokens = divide(spec.vocab_size, shard.tp_size)[shard.tp_rank]
        return cls(shard, spec, part, layers, heads, kv_heads, inner, expert_inner, tokens)


def divide(total: int, count: int) -> list[range]:
    """Return `count` ranges that make up range(total), the longer ones last."""
    bounds = [total * index // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _check(spec: ModelSpec, shard: Shard) -> None:
    if shard.pp_size > spec.num_layers:
        raise ConfigError(
            f"option pipeline_parallel_size is {shard.pp_size} but must be at most the "
            f"{spec.num_layers} layers of the model"
        )
    num_kv_heads, tp_size = spec.num_kv_heads, shard.tp_size
    if tp_size > num_kv_heads and (tp_size % num_kv_heads or tp_size > spec.num_heads):
        raise ConfigError(
            f"option tensor_parallel_size is {tp_size} but must be at most the {num_kv_heads} KV "
            f"heads of the model, or a multiple of them that is at most its {spec.num_heads} "
            "query heads"
        )
    sizes = {"intermediate_size": spec.intermediate_size, "vocab_size": spec.vocab_size}
    if spec.experts is not None:
        sizes["experts' intermediate_size"] = spec.experts.intermediate_size
    name, narrowest = min(sizes.items(), key=lambda item: item[1])
    if tp_size > narrowest:
        raise ConfigError(
            f"option tensor_parallel_size is {tp_size} but must be at most {narrowest}, the "
            f"model's {name}"
        )


def _layers(num_layers: int, shard: Shard) -> range:
    # Longer ranges go to the earlier stages, for the last one has the vocabulary as well.
    from_end = divide(num_layers, shard.pp_size)[shard.pp_size - 1 - shard.pp_stage]
    return range(num_layers - from_end.stop, num_layers - from_end.start)


def _experts(spec: ModelSpec, shard: Shard, layers: range) -> tuple[ExpertSpec | None, range]:
    """Return a rank's part of the experts, which is some inner columns of each."""
    experts = spec.experts
    if experts is None:
        return None, range(0)
    inner = divide(experts.intermediate_size, shard.tp_size)[shard.tp_rank]
    own = experts.layers[layers.start : layers.stop]
    return replace(experts, intermediate_size=len(inner), layers=own), inner


def _heads(spec: ModelSpec, shard: Shard) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank."""
    group = spec.num_heads // spec.num_kv_heads
    if shard.tp_size <= spec.num_kv_heads:
        kv_heads = divide(spec.num_kv_heads, shard.tp_size)[shard.tp_rank]
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    ranks_per_head = shard.tp_size // spec.num_kv_heads
    kv_head, place = divmod(shard.tp_rank, ranks_per_head)
    heads = divide(group, ranks_per_head)[place]
    first = kv_head * group
    return range(first + heads.start, first + heads.stop), range(kv_head, kv_head + 1)
