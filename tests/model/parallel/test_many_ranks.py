"""Several ranks compute what one device does: to the bit by stages, nearly so by tensor parts."""

import functools
from dataclasses import replace

import pytest
import torch

from octavo.model.decoder import Decoder
from octavo_kernels.reference_attention import ReferenceAttention

# Of 6 query heads, 2 KV heads and 3 layers: evenly, unevenly, and with KV heads held twice.
GRIDS = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
EVERY_GRID = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmo2")
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 27,
        "mlp_only_layers": [1],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "phi3": {"sliding_window": 20},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 20},
    "granite": {"residual_multiplier": 0.4, "logits_scaling": 0.5, "mlp_bias": True},
    "olmo2": {},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "stablelm": {
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": True,
    },
}


@pytest.mark.parametrize(
    ("family", "tp_size", "pp_size"),
    [
        (family, *grid)
        for family in FAMILIES
        for grid in (GRIDS if family in EVERY_GRID else [(2, 2)])
    ],
)
def test_greedy_tokens_are_those_of_a_single_device(
    family, tp_size, pp_size, make_checkpoint, load, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint(family, **FAMILIES[family])
    prompts = {str(length): make_prompt(length) for length in (1, 16, 37)}
    expected, logits = make_driver(load(directory)).generate(prompts, num_tokens=8, chunk=16)
    ranks = load_ranks(directory, tp_size, pp_size)
    tokens, many_logits = make_driver(ranks).generate(prompts, num_tokens=8, chunk=16)
    assert tokens == expected
    for name in prompts:
        # Logits are of the order of 5; partial sums are added in another order.
        torch.testing.assert_close(many_logits[name], logits[name], rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_change_no_bit(dtype, make_checkpoint, load, load_ranks, make_driver, make_prompt):
    directory, _ = make_checkpoint("llama", head_dim=16)
    prompt = {"a": make_prompt(40)}
    whole = make_driver(load(directory, dtype)).step(prompt, all_rows=True)
    stages = make_driver(load_ranks(directory, 1, 3, dtype)).step(prompt, all_rows=True)
    assert torch.equal(stages, whole)


# The second one's heads are normalised as one, by sums that ranks exchange.
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_batch_or_chunks(
    dtype, family, make_checkpoint, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint(family, head_dim=16)
    ranks = load_ranks(directory, 2, 2, dtype)
    prompts = {str(n): make_prompt(n) for n in (40, 1, 17)}
    alone = {}
    for name, prompt in prompts.items():
        driver = make_driver(ranks)
        alone[name] = driver.generate({name: prompt}, num_tokens=4, chunk=1000)[1][name]
    for chunk in (1, 16, 1000):
        _, together = make_driver(ranks, seed=chunk).generate(prompts, num_tokens=4, chunk=chunk)
        for name in prompts:
            assert torch.equal(together[name], alone[name]), (name, chunk)


def test_bfloat16_stays_near_a_single_device(
    make_checkpoint, load, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama", head_dim=16)
    prompt = {"a": make_prompt(60)}
    whole = make_driver(load(directory, "bfloat16")).step(prompt, all_rows=True).log_softmax(-1)
    parts = make_driver(load_ranks(directory, 2, 1, "bfloat16")).step(prompt, all_rows=True)
    # As far apart as two orders of operations on one device: see test_decoder.
    assert (parts.log_softmax(-1) - whole).abs().max() < 0.35
    assert (parts.log_softmax(-1) - whole).abs().mean() < 0.05


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_bytes_sent_are_those_of_the_formula(
    tp_size, pp_size, make_checkpoint, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama")
    ranks = load_ranks(directory, tp_size, pp_size)
    driver = make_driver(ranks)
    driver.step({"a": make_prompt(9), "b": make_prompt(4)})
    state_bytes = 13 * 60 * 4
    for rank in ranks.ranks:
        shard = rank.shard
        num_sums = 2 * rank.model.decoder.spec.num_layers + shard.is_first_stage
        expected = num_sums * (tp_size - 1) * state_bytes
        expected += 0 if shard.is_last_stage else state_bytes
        if shard.is_last_stage and shard.tp_rank:
            expected += 2 * -(-211 // tp_size) * 4
        assert rank.groups.sent_bytes == expected, shard


def test_a_step_that_draws_nothing_leaves_the_vocabulary_alone(
    make_checkpoint, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama")
    ranks = load_ranks(directory, 2)
    driver = make_driver(ranks)
    driver.step({"a": make_prompt(5)}, all_rows=True)
    sent_bytes = ranks.ranks[1].groups.sent_bytes
    ranks.forward = functools.partial(no_rows, ranks.forward)
    assert driver.step({"a": make_prompt(5)}).shape == (0, 211)
    # One sum for the embedding and two a layer, and no logits.
    assert ranks.ranks[1].groups.sent_bytes - sent_bytes == 7 * 5 * 60 * 4


def no_rows(forward, *args):
    return forward(*args[:-1], torch.empty(0, dtype=torch.int64))


def test_operations_one_by_one_have_the_tokens_of_one_call(
    make_checkpoint, load, load_ranks, make_driver, make_prompt
):
    directory, _ = make_checkpoint("qwen3", head_dim=16)
    prompts = {"a": make_prompt(20)}
    expected, _ = make_driver(load(directory)).generate(prompts, num_tokens=6, chunk=16)
    ranks = load_ranks(directory, 2)
    for rank in ranks.ranks:
        model = rank.model
        # Native layers serve native attention alone.
        attention = ReferenceAttention(model.attention.shape, model.device)
        decoder = Decoder(model.decoder.spec, model.decoder.weights, attention, rank.groups)
        rank.model = replace(model, decoder=decoder, attention=attention)
    tokens, _ = make_driver(ranks).generate(prompts, num_tokens=6, chunk=16)
    assert tokens == expected
