"""Ranks hold every part of a model, each once, and what cannot be divided is refused by name."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.model.rope import RopeSpec
from octavo.model.shard import WHOLE, ModelPart, Shard
from octavo.model.spec import ExpertSpec, ModelSpec, NormSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=211,
    hidden_size=60,
    intermediate_size=106,
    num_layers=3,
    num_heads=12,
    num_kv_heads=3,
    head_dim=10,
    max_position_embeddings=256,
    norm=NormSpec("rms", 1e-5),
    ropes=(RopeSpec(10, 10_000.0), None, RopeSpec(10, 500.0)),
    windows=(None, 20, 30),
    attention_scale=10**-0.5,
    tied_embeddings=False,
    eos_token_ids=(),
    dtype=None,
)


def parts_of(tp_size, pp_size=1, spec=SPEC):
    shards = [Shard.of(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
    return [ModelPart.of(spec, shard) for shard in shards]


def test_rank_0_is_the_first_of_the_last_stage():
    shards = [Shard.of(rank, 2, 3) for rank in range(6)]
    assert [(shard.pp_stage, shard.tp_rank) for shard in shards] == [
        (2, 0),
        (2, 1),
        (1, 0),
        (1, 1),
        (0, 0),
        (0, 1),
    ]
    assert [shard.rank for shard in shards] == [0, 1, 2, 3, 4, 5]
    assert [shard.is_first_stage for shard in shards] == [False] * 4 + [True] * 2
    assert [shard.is_last_stage for shard in shards] == [True] * 2 + [False] * 4
    assert str(shards[3]) == "rank 3 (tensor part 1 of 2, stage 1 of 3)"


def test_one_rank_holds_the_whole_model():
    assert Shard.of(0, 1, 1) == WHOLE
    part = ModelPart.of(SPEC, WHOLE)
    assert part.spec == SPEC
    assert (part.layers, part.heads, part.kv_heads) == (range(3), range(12), range(3))
    assert (part.inner, part.tokens) == (range(106), range(211))


def test_fewer_kv_heads_than_ranks_are_held_by_several():
    parts = parts_of(6)
    assert [list(part.kv_heads) for part in parts] == [[0], [0], [1], [1], [2], [2]]
    assert [part.heads for part in parts] == [range(2 * i, 2 * i + 2) for i in range(6)]


def test_kv_heads_are_divided_as_evenly_as_they_can_be():
    first, second = parts_of(2)
    assert (first.kv_heads, first.heads) == (range(1), range(4))
    assert (second.kv_heads, second.heads) == (range(1, 3), range(4, 12))
    assert (second.spec.num_heads, second.spec.num_kv_heads) == (8, 2)


def test_the_last_stage_has_fewer_layers_where_they_do_not_divide():
    last, first = parts_of(1, 2)
    assert (first.layers, last.layers) == (range(2), range(2, 3))
    assert (first.spec.windows, last.spec.windows) == ((None, 20), (30,))
    assert (first.spec.num_layers, last.spec.num_layers) == (2, 1)


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)
)
def test_ranks_hold_everything_once(num_kv_heads, group, tp_size, pp_size, more_layers):
    num_layers = pp_size + more_layers
    spec = replace(
        SPEC,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        num_layers=num_layers,
        windows=(None,) * num_layers,
    )
    try:
        parts = parts_of(tp_size, pp_size, spec)
    except ConfigError:
        assert tp_size > num_kv_heads
        return
    for name, total, times in (
        ("layers", num_layers, tp_size),
        ("heads", spec.num_heads, pp_size),
        ("inner", spec.intermediate_size, pp_size),
        ("tokens", spec.vocab_size, pp_size),
    ):
        held = Counter(index for part in parts for index in getattr(part, name))
        assert held == dict.fromkeys(range(total), times), name
    for part in parts:
        assert sorted({head // group for head in part.heads}) == list(part.kv_heads)
        assert part.spec.num_heads % part.spec.num_kv_heads == 0


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "message"),
    [
        (
            5,
            1,
            "option tensor_parallel_size is 5 but must be at most the 3 KV heads of the model, or "
            "a multiple of them that is at most its 12 query heads",
        ),
        (15, 1, "option tensor_parallel_size is 15 but must be at most the 3 KV heads"),
        (1, 4, "option pipeline_parallel_size is 4 but must be at most the 3 layers of the model"),
    ],
)
def test_what_cannot_be_divided_is_refused(tp_size, pp_size, message):
    with pytest.raises(ConfigError) as error:
        parts_of(tp_size, pp_size)
    assert str(error.value).startswith(message)


def test_a_model_narrower_than_the_group_is_refused():
    with pytest.raises(ConfigError, match="is 3 but must be at most 2, the model's intermediate"):
        parts_of(3, 1, replace(SPEC, intermediate_size=2))


def test_keys_that_several_ranks_have_are_summed_by_the_first():
    assert [part.adds_keys for part in parts_of(2, 1)] == [True, True]
    assert [part.adds_keys for part in parts_of(6, 1)] == [True, False] * 3


def test_inner_columns_of_experts_are_divided_and_their_layers_go_to_stages():
    experts = ExpertSpec(
        num_experts=5,
        experts_per_token=2,
        intermediate_size=7,
        normalizes_weights=True,
        layers=(True, False, True),
    )
    parts = parts_of(2, 2, replace(SPEC, experts=experts))
    assert [list(part.expert_inner) for part in parts] == [[0, 1, 2], [3, 4, 5, 6]] * 2
    assert [part.spec.experts.layers for part in parts] == [(True,)] * 2 + [(True, False)] * 2
    assert [part.spec.experts.intermediate_size for part in parts] == [3, 4] * 2
    with pytest.raises(ConfigError, match="is 3 but must be at most 2, the model's experts' inter"):
        parts_of(3, 1, replace(SPEC, experts=replace(experts, intermediate_size=2)))
